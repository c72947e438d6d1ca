"""The Core ML evaluator's layers, against numpy after coremltools' docstrings, coremltools' own numpy, or torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mil_cases import Case, check, computed, normal

EQUATION = "nchw,nwhu->nchu"


def conv_reference(
    pads: list[tuple[int, int]], strides: list[int], dilations: list[int], groups: int
) -> Callable[..., np.ndarray]:
    """The docstring's sum, position by position, with the padding amounts stated by the case."""

    def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
        x = np.pad(x, [(0, 0), (0, 0), *pads])
        spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
        sizes = [(n - span) // s + 1 for n, span, s in zip(x.shape[2:], spans, strides, strict=True)]
        out = np.zeros((x.shape[0], weight.shape[0], *sizes), np.float32)
        channels, outputs = weight.shape[1], weight.shape[0] // groups
        for o in range(weight.shape[0]):
            of_group = slice(o // outputs * channels, (o // outputs + 1) * channels)
            for position in itertools.product(*map(range, sizes)):
                starts = [p * s for p, s in zip(position, strides, strict=True)]
                window = tuple(slice(a, a + n, d) for a, n, d in zip(starts, spans, dilations, strict=True))
                patch = x[(slice(None), of_group, *window)]
                out[(slice(None), o, *position)] = (patch * weight[o]).reshape(len(x), -1).sum(1)
        return out + np.reshape(bias, (-1, *[1] * len(sizes)))

    return reference


def pool_reference(
    pads: list[tuple[int, int]], kernel: list[int], strides: list[int], sizes: list[int], reduce: Callable, value: float
) -> Callable[..., np.ndarray]:
    """`sizes` are the output's. Windows are clipped at the padded input's end; `value` fills the padding."""

    def reference(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=value)
        out = np.zeros((*x.shape[:2], *sizes), np.float32)
        for position in itertools.product(*map(range, sizes)):
            window = tuple(slice(p * s, p * s + k) for p, s, k in zip(position, strides, kernel, strict=True))
            out[(..., *position)] = reduce(x[(..., *window)].reshape(*x.shape[:2], -1), axis=-1)
        return out

    return reference


IMAGE, WEIGHT = normal(2, 4, 7, 6), normal(6, 4, 3, 2)
ATTENTION = {name: normal(2, 3, size, 4) for name, size in (("query", 5), ("key", 6), ("value", 6))}
FOUR_CHANNELS = {name: abs(normal(4)) for name in ("mean", "variance", "gamma", "beta")}
HALF = np.float32(0.5)


def conv_cases() -> list[Case]:
    def case(x: np.ndarray, weight: np.ndarray, pads: list[tuple[int, int]], **constants: Any) -> Case:
        rank = x.ndim - 2
        strides, dilations = (constants.get(name, [1] * rank) for name in ("strides", "dilations"))
        reference = conv_reference(pads, strides, dilations, constants.get("groups", 1))
        return Case("conv", {"x": x}, constants | {"weight": weight, "bias": normal(len(weight))}, reference)

    none = [(0, 0), (0, 0)]
    return [
        Case("conv", {"x": IMAGE}, {"weight": WEIGHT}, conv_reference(none, [1, 1], [1, 1], 1)),
        case(IMAGE, WEIGHT, none, pad_type="valid", strides=[2, 1]),
        case(IMAGE, WEIGHT, [(1, 2), (0, 3)], pad_type="custom", pad=[1, 2, 0, 3], strides=[2, 3]),
        case(IMAGE, WEIGHT, [(2, 2), (1, 1)], pad_type="custom", pad=[2, 2, 1, 1], dilations=[2, 3]),
        # 7 rows at stride 1, kernel 3: 2 in all; 6 columns at stride 1, kernel 2: 1 in all, which goes behind.
        case(IMAGE, WEIGHT, [(1, 1), (0, 1)], pad_type="same"),
        case(IMAGE, WEIGHT, [(1, 1), (1, 0)], pad_type="same_lower"),
        # 6 rows at stride 2, kernel 3: 3 outputs want 7 rows; 7 columns at stride 3, kernel 2: 3 want 8.
        case(IMAGE.swapaxes(2, 3), WEIGHT, [(0, 1), (0, 1)], pad_type="same", strides=[2, 3]),
        case(IMAGE.swapaxes(2, 3), WEIGHT, [(1, 0), (1, 0)], pad_type="same_lower", strides=[2, 3]),
        case(IMAGE, normal(8, 1, 3, 3), none, groups=4),  # depthwise, two outputs a channel
        case(IMAGE, normal(6, 2, 3, 3), [(1, 1), (1, 1)], pad_type="custom", pad=[1, 1, 1, 1], groups=2),
        case(normal(2, 3, 9), normal(4, 3, 3), [(1, 1)], pad_type="custom", pad=[1, 1], strides=[2]),
        case(normal(1, 2, 4, 5, 4), normal(3, 2, 2, 3, 2), [(0, 0)] * 3),
    ]


def conv_transpose_cases() -> list[Case]:
    """Against torch, whose own padding and output_padding they state in Core ML's words."""

    def case(x: np.ndarray, weight: np.ndarray, torch_arguments: dict[str, Any], **constants: Any) -> Case:
        def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
            function = (F.conv_transpose1d, F.conv_transpose2d)[x.ndim - 3]
            return function(*map(torch.from_numpy, (x, weight, bias)), **torch_arguments).numpy()

        outputs = weight.shape[1] * constants.get("groups", 1)
        return Case("conv_transpose", {"x": x}, constants | {"weight": weight, "bias": normal(outputs)}, reference)

    x, weight = normal(1, 4, 5, 6), normal(4, 3, 3, 2)
    two: dict[str, Any] = {"stride": [2, 3], "dilation": [2, 1]}
    twos: dict[str, Any] = {"strides": [2, 3], "dilations": [2, 1]}
    padded = {"pad_type": "custom", "pad": [1, 1, 0, 0]}
    return [
        case(x, weight, {}),
        case(x, weight, two, **twos),
        case(x, weight, two | {"padding": [1, 0]}, **twos, **padded),
        case(
            x,
            weight,
            two | {"padding": [1, 0], "output_padding": [1, 2]},
            **twos,
            **padded,
            output_shape=[1, 3, 12, 19],
        ),
        case(x, normal(4, 3, 2, 2), {"stride": 2, "groups": 2}, strides=[2, 2], groups=2),
        case(normal(2, 3, 7), normal(3, 2, 4), {"stride": 2, "padding": 1}, strides=[2], pad_type="same"),
    ]


def pool_cases() -> list[Case]:
    def case(op: str, pads: list[tuple[int, int]], sizes: list[int], reduce: Callable, **constants: Any) -> Case:
        kernel, strides = constants["kernel_sizes"], constants["strides"]
        fill = 0.0 if reduce is np.mean else np.nan
        return Case(op, {"x": IMAGE}, constants, pool_reference(pads, kernel, strides, sizes, reduce, fill))

    def root(window: np.ndarray, axis: int) -> np.ndarray:
        return np.sqrt((window**2).sum(axis))

    window: dict[str, Any] = {"kernel_sizes": [3, 2], "strides": [2, 2]}
    padded = window | {"pad_type": "custom", "pad": [1, 1, 1, 0]}
    square: dict[str, Any] = {"kernel_sizes": [3, 3], "strides": [2, 2], "pad_type": "custom", "pad": [1, 1, 1, 1]}
    none, one = [(0, 0), (0, 0)], [(1, 1), (1, 1)]
    return [
        case("max_pool", none, [3, 3], np.max, pad_type="valid", **window),
        case("max_pool", [(1, 1), (1, 0)], [4, 3], np.nanmax, **padded),
        case("max_pool", one, [4, 3], np.nanmax, **square),
        case("max_pool", [(1, 1), (0, 0)], [4, 3], np.nanmax, pad_type="same", **window),
        case("max_pool", none, [3, 3], np.max, pad_type="valid", ceil_mode=True, **window),
        # ceil((7 + 2 - 2) / 2) + 1 = 5 windows of rows, but the fifth would begin in the padding behind: 4
        case("max_pool", one, [4, 4], np.nanmax, **square | {"kernel_sizes": [2, 2]}, ceil_mode=True),
        case("l2_pool", none, [3, 3], root, pad_type="valid", **window),
        case("avg_pool", none, [3, 3], np.mean, pad_type="valid", **window),
        case("avg_pool", [(1, 1), (1, 0)], [4, 3], np.mean, **padded),
        case("avg_pool", [(1, 1), (1, 0)], [4, 3], np.nanmean, exclude_padding_from_average=True, **padded),
        case("avg_pool", one, [4, 3], np.mean, **square),
        case("avg_pool", one, [4, 3], np.nanmean, exclude_padding_from_average=True, **square),
        # One column of padding, behind for `same` and before for `same_lower`.
        case("avg_pool", [(1, 1), (0, 1)], [7, 6], np.mean, pad_type="same", kernel_sizes=[3, 2], strides=[1, 1]),
        case("avg_pool", [(1, 1), (1, 0)], [7, 6], np.mean, pad_type="same_lower", kernel_sizes=[3, 2], strides=[1, 1]),
    ]


def linear_cases() -> list[Case]:
    x = normal(2, 3, 4)
    weight, bias = normal(5, 4), normal(5)
    mask = np.array([[True, False, True, True, False, True]] * 5)
    mask[0] = [False, False, False, False, False, True]
    statistics = FOUR_CHANNELS | {"epsilon": HALF}

    def batch_norm(x: np.ndarray) -> np.ndarray:
        mean, variance, gamma, beta = (FOUR_CHANNELS[name].reshape(4, 1, 1) for name in FOUR_CHANNELS)
        return gamma * (x - mean) / np.sqrt(variance + 0.5) + beta

    def plain_batch_norm(x: np.ndarray) -> np.ndarray:
        mean, variance = (FOUR_CHANNELS[name].reshape(4, 1, 1) for name in ("mean", "variance"))
        return (x - mean) / np.sqrt(variance + 1e-5)

    def instance_norm(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean((2, 3), keepdims=True)
        gamma, beta = (FOUR_CHANNELS[name].reshape(4, 1, 1) for name in ("gamma", "beta"))
        return gamma * centred / np.sqrt((centred**2).mean((2, 3), keepdims=True) + 0.5) + beta

    def local_response_norm(x: np.ndarray) -> np.ndarray:
        """Three channels around each."""
        squares = np.pad(x**2, [(0, 0), (1, 1), (0, 0), (0, 0)])
        around = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
        return x / (2 + 0.5 / 3 * around) ** 0.75

    def multiplied(values: list[np.ndarray]) -> np.ndarray:
        return np.einsum(EQUATION, *values)

    scale = {name: FOUR_CHANNELS[name] for name in ("gamma", "beta")} | {"epsilon": HALF}
    lrn = {"size": 3, "alpha": HALF, "beta": np.float32(0.75), "k": np.float32(2)}
    return [
        Case("linear", {"x": x}, {"weight": weight, "bias": bias}),
        Case("linear", {"x": x}, {"weight": weight}),
        Case("matmul", {"x": x, "y": normal(5, 1, 4, 2)}),
        Case("matmul", {"x": x, "y": normal(2, 5, 4)}, {"transpose_y": True}),
        Case("matmul", {"x": normal(2, 4, 3), "y": normal(5, 4)}, {"transpose_x": True, "transpose_y": True}),
        Case("batch_norm", {"x": IMAGE}, statistics, batch_norm),
        Case("batch_norm", {"x": IMAGE}, dict(list(FOUR_CHANNELS.items())[:2]), plain_batch_norm),
        Case("layer_norm", {"x": x}, {"axes": [-1], "gamma": normal(4), "beta": normal(4), "epsilon": HALF}),
        Case("layer_norm", {"x": x}, {"axes": [1, 2], "gamma": normal(3, 4), "beta": normal(3, 4)}),
        Case("layer_norm", {"x": x}, {"axes": [0, 2], "gamma": normal(2, 4), "beta": normal(2, 4)}),
        Case("layer_norm", {"x": 0.01 * x}, {"axes": [1], "epsilon": np.float32(1e-3)}),
        Case("instance_norm", {"x": IMAGE}, scale, instance_norm),
        Case("l2_norm", {"x": IMAGE}, {"epsilon": HALF}),
        Case("local_response_norm", {"x": IMAGE}, lrn, local_response_norm),
        Case("einsum", {"values": [normal(2, 3, 4, 5), normal(2, 5, 4, 6)]}, {"equation": EQUATION}, multiplied),
        Case("scaled_dot_product_attention", ATTENTION, opset="ios18"),
        Case("scaled_dot_product_attention", {**ATTENTION, "attn_mask": mask}, opset="ios18"),
        Case("scaled_dot_product_attention", {**ATTENTION, "attn_mask": normal(5, 6)}, opset="ios18"),
    ]


CASES = [*conv_cases(), *conv_transpose_cases(), *pool_cases(), *linear_cases()]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, np.ndarray]:
    return computed(CASES, tmp_path_factory.mktemp("ops"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{case}" for i, case in enumerate(CASES)])
def test_op_computes_what_coremltools_defines(results, index):
    check(CASES[index], index, results)
