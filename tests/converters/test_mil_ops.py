"""Each op of the Core ML evaluator against coremltools' own definition of it.

The expected value is coremltools' value inference (its numpy implementation, which runs where an op's inputs are
constants) wherever it has one; otherwise numpy, after the op's docstring. All cases of one opset stand in one program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 (its own documentation's name)
from coremltools.converters.mil.mil import Function, types
from coremltools.converters.mil.mil import Program as MilProgram

from converters.mil import Program
from converters.mil_ops import OPS

RNG = np.random.default_rng(0)
OPSETS = {"ios16": ct.target.iOS16, "ios18": ct.target.iOS18}
INPUT_TYPES = {"float32": types.fp32, "int32": types.int32}


@dataclass(frozen=True)
class Case:
    """`tensors` are the program's inputs (a list for `values`), `constants` the op's other arguments."""

    op: str
    tensors: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    expected: Callable[..., np.ndarray] | None = None  # of the tensors; None: coremltools' value inference
    opset: str = "ios16"

    def __str__(self) -> str:
        plain = {name: value for name, value in self.constants.items() if not isinstance(value, np.ndarray)}
        return " ".join([self.op, *(f"{name}={value}" for name, value in plain.items())])


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, size=shape).astype(np.int32)


# References in numpy, for the ops that have no value inference.


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


def bilinear_reference(height: int, width: int, align_corners: bool) -> Callable[..., np.ndarray]:
    """The docstring's grid points of each axis, interpolated one axis after the other."""

    def along(x: np.ndarray, axis: int, size: int) -> np.ndarray:
        n = x.shape[axis]
        i = np.arange(size)
        grid = i * (n - 1) / (size - 1) if align_corners else i * n / size + 0.5 * n / size - 0.5
        return np.apply_along_axis(lambda line: np.interp(grid.clip(0, n - 1), np.arange(n), line), axis, x)

    return lambda x: along(along(x, -2, height), -1, width)


IMAGE, WEIGHT = normal(2, 4, 7, 6), normal(6, 4, 3, 2)
ATTENTION = {name: normal(2, 3, size, 4) for name, size in (("query", 5), ("key", 6), ("value", 6))}
FOUR_CHANNELS = {name: abs(normal(4)) for name in ("mean", "variance", "gamma", "beta")}
INDEX = np.array([[2, -1], [0, 1]], np.int32)
HALF = np.float32(0.5)


def elementwise_cases() -> list[Case]:
    a, b = normal(2, 3, 4), normal(3, 1)
    same = integers(2, 3, 4).astype(np.float32)  # with ties
    yes, no = same > 0, integers(3, 1) > 0
    unary = ["abs", "erf", "exp", "identity", "relu", "sigmoid", "square", "tanh"]
    return [
        *(Case(op, {"x": a}) for op in unary),
        Case("relu6", {"x": 6 * a}),
        Case("silu", {"x": a}, expected=lambda x: x / (1 + np.exp(-x))),
        Case("sqrt", {"x": abs(a)}),
        Case("logical_not", {"x": yes}),
        *(Case(op, {"x": a, "y": b}) for op in ("add", "sub", "mul", "real_div", "maximum", "minimum")),
        *(Case(op, {"x": integers(2, 3), "y": integers(3)}) for op in ("add", "sub", "mul", "maximum", "minimum")),
        Case("pow", {"x": abs(a), "y": b}),
        *(Case(op, {"x": same, "y": np.float32([[1]])}) for op in ("equal", "not_equal", "greater", "less")),
        *(Case(op, {"x": same, "y": np.float32([[1]])}) for op in ("greater_equal", "less_equal")),
        *(Case(op, {"x": yes, "y": no}) for op in ("logical_and", "logical_or")),
        Case("select", {"cond": yes, "a": a, "b": -a}),
        Case("clip", {"x": a}, {"alpha": -HALF, "beta": np.float32(0.25)}),
        *(Case("gelu", {"x": 3 * a}, {"mode": f"{how}_APPROXIMATION"}) for how in ("TANH", "SIGMOID")),
        Case("gelu", {"x": 3 * a}, {"mode": "EXACT"}),
        Case("rsqrt", {"x": abs(a)}, {"epsilon": HALF}),
        Case("sigmoid_hard", {"x": 3 * a}, {"alpha": np.float32(0.2), "beta": HALF}),
        Case("thresholded_relu", {"x": a}, {"alpha": -HALF}, lambda x: np.where(x >= -0.5, x, 0)),
        *(Case("softmax", {"x": a}, {"axis": axis}) for axis in (0, 1, -1)),
        Case("cast", {"x": 3 * a}, {"dtype": "int32"}),
        Case("cast", {"x": integers(3, 4)}, {"dtype": "fp32"}),
        Case("cast", {"x": 1000 * a}, {"dtype": "fp16"}),
        Case("cast", {"x": same}, {"dtype": "bool"}),
        *(Case("cast", {"x": abs(9 * a)}, {"dtype": f"{u}int{n}"}, opset="ios18") for u in ("", "u") for n in (8, 16)),
    ]


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


def pool_cases() -> list[Case]:
    def case(op: str, pads: list[tuple[int, int]], sizes: list[int], reduce: Callable, **constants: Any) -> Case:
        kernel, strides = constants["kernel_sizes"], constants["strides"]
        fill = 0.0 if reduce is np.mean else np.nan
        return Case(op, {"x": IMAGE}, constants, pool_reference(pads, kernel, strides, sizes, reduce, fill))

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
        *(Case(f"reduce_{how}", {"x": x}, {"axes": [0, -1]}) for how in ("max", "mean", "min", "sum")),
        Case("reduce_mean", {"x": IMAGE}, {"axes": [2, 3], "keep_dims": True}),
        Case("reduce_mean", {"x": IMAGE}, {"keep_dims": True}),
        Case("reduce_sum", {"x": IMAGE}, {"axes": [1, 2, 3], "keep_dims": False}),
        Case("scaled_dot_product_attention", ATTENTION, opset="ios18"),
        Case("scaled_dot_product_attention", {**ATTENTION, "attn_mask": mask}, opset="ios18"),
        Case("scaled_dot_product_attention", {**ATTENTION, "attn_mask": normal(5, 6)}, opset="ios18"),
    ]


def shape_cases() -> list[Case]:
    x = normal(2, 3, 4)
    ones = normal(1, 3, 1, 4)
    window = {"begin": [0, -3, 1], "end": [2, 3, -1]}
    masks = {"begin_mask": [True, False, False], "end_mask": [False, True, True]}
    return [
        Case("reshape", {"x": x}, {"shape": [4, -1]}),
        Case("reshape", {"x": x}, {"shape": [0, 2, -1]}),
        Case("transpose", {"x": x}, {"perm": [2, 0, 1]}),
        Case("expand_dims", {"x": x}, {"axes": [0, -1]}),
        Case("expand_dims", {"x": x}, {"axes": [3, 1]}),
        Case("squeeze", {"x": ones}, {"axes": [0]}),
        Case("squeeze", {"x": ones}),
        Case("concat", {"values": [x, 2 * x, normal(2, 1, 4)]}, {"axis": 1}, lambda values: np.concatenate(values, 1)),
        Case("concat", {"values": [x, 2 * x]}, {"axis": -1}, lambda values: np.concatenate(values, -1)),
        Case("stack", {"values": [x, 2 * x]}, {"axis": 1}),
        Case("stack", {"values": [x, 2 * x]}, {"axis": -1}),
        Case("split", {"x": x}, {"axis": 2, "num_splits": 2}),
        Case("split", {"x": x}, {"axis": 2, "split_sizes": [1, 3]}),
        Case("slice_by_index", {"x": x}, window),
        Case("slice_by_index", {"x": x}, window | masks | {"begin": [1, -3, 1], "stride": [1, 2, 2]}),
        Case("slice_by_index", {"x": x}, window | {"squeeze_mask": [False, True, False]}),
        Case("slice_by_size", {"x": x}, {"begin": [1, 0, -2], "size": [1, 2, 2]}),
        Case("slice_by_size", {"x": x}, {"begin": [0, 1, 2], "size": [-1, 1, -1]}),
        Case("pad", {"x": x}, {"pad": [1, 0, 0, 2, 3, 1], "constant_val": np.float32(7)}),
        Case("pad", {"x": x}, {"pad": [1, 2]}),
        Case("pad", {"x": IMAGE}, {"pad": [0, 0, 0, 0, 2, 3, 1, 0], "mode": "reflect"}),
        Case("pad", {"x": IMAGE}, {"pad": [2, 3, 1, 0], "mode": "replicate"}),
        Case("pad", {"x": normal(3, 4)}, {"pad": [2, 1], "mode": "reflect"}),
        Case("tile", {"x": x}, {"reps": [2, 1, 3]}),
        Case("gather", {"x": x, "indices": INDEX}, {"axis": 1}),
        Case("gather", {"x": x, "indices": INDEX[0]}, {"axis": -1}),
        Case("gather", {"x": x, "indices": abs(INDEX)}, {"axis": 1, "validate_indices": True}, opset="ios18"),
        Case("gather", {"x": x}, {"indices": np.int32(1), "axis": 1}),
    ]


def resize_cases() -> list[Case]:
    def upsample(height: float, width: float, size: tuple[int, int], **how: bool) -> Case:
        factors = {"scale_factor_height": height, "scale_factor_width": width}
        reference = bilinear_reference(*size, align_corners=how.get("align_corners", True))
        return Case("upsample_bilinear", {"x": IMAGE}, factors | how, reference)

    def resize(mode: str, align_corners: bool) -> Case:
        constants = {"target_size_height": 4, "target_size_width": 9, "sampling_mode": mode}
        return Case("resize_bilinear", {"x": IMAGE}, constants, bilinear_reference(4, 9, align_corners))

    up = np.float32
    return [
        upsample(up(8 / 7), up(2), (8, 12), align_corners=False),  # 7 → 8, as for an odd map of MobileViT
        upsample(up(4 / 7), up(5 / 6), (4, 5), align_corners=False, half_pixel_centers=True),
        upsample(up(1.5), up(2), (10, 12), align_corners=True),
        upsample(2, 3, (14, 18)),
        resize("STRICT_ALIGN_CORNERS", True),
        resize("ALIGN_CORNERS", True),
        resize("UNALIGN_CORNERS", False),
        Case(
            "upsample_nearest_neighbor",
            {"x": IMAGE},
            {"scale_factor_height": up(2), "scale_factor_width": up(3)},
            lambda x: x.repeat(2, 2).repeat(3, 3),
        ),
    ]


CASES = [
    *elementwise_cases(),
    *conv_cases(),
    *pool_cases(),
    *linear_cases(),
    *shape_cases(),
    *resize_cases(),
]


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def saved_program(cases: dict[str, Case], opset: str, folder: Any) -> Program:
    """One program with an input for each tensor of each case, and an output `CASE_I` for each result.

    Truth values go in and out as fp32, since a program's inputs and outputs cannot be bool.
    """
    fed = {
        f"{key}_{name}_{i}": array
        for key, case in cases.items()
        for name, value in case.tensors.items()
        for i, array in enumerate(listed(value))
    }
    specs = {
        name: mb.placeholder(array.shape, INPUT_TYPES.get(array.dtype.name, types.fp32)) for name, array in fed.items()
    }
    with Function(specs, opset_version=OPSETS[opset]) as function:
        outputs = []
        for key, case in cases.items():
            arguments = dict(case.constants)
            for name, value in case.tensors.items():
                given = [function.inputs[f"{key}_{name}_{i}"] for i in range(len(listed(value)))]
                if listed(value)[0].dtype == bool:
                    given = [mb.cast(x=var, dtype="bool") for var in given]
                arguments[name] = given if isinstance(value, list) else given[0]
            for i, var in enumerate(listed(getattr(mb, case.op)(**arguments))):
                dtype = "fp32" if var.dtype in (types.bool, types.fp16) else "int32" if types.is_int(var.dtype) else ""
                outputs.append(mb.cast(x=var, dtype=dtype or "fp32", name=f"{key}_{i}"))
        function.set_outputs(outputs)
    program = MilProgram()
    program.add_function("main", function)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=OPSETS[opset],
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    path = folder / f"{opset}.mlpackage"
    model.save(str(path))
    return Program(path)


def value_inference(case: Case) -> list[np.ndarray]:
    """What coremltools' numpy implementation of the op gives for constant inputs."""
    with Function({}, opset_version=OPSETS[case.opset]):
        tensors = {  # copies, since the inference of some ops works in place
            name: [array.copy() for array in value] if isinstance(value, list) else value.copy()
            for name, value in case.tensors.items()
        }
        results = [var.val for var in listed(getattr(mb, case.op)(**tensors, **case.constants))]
    assert all(value is not None for value in results), f"{case.op} has no value inference: state what is expected"
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, np.ndarray]:
    """Every case's outputs, as the saved programs compute them."""
    found: dict[str, np.ndarray] = {}
    for opset in OPSETS:
        cases = {f"c{i}": case for i, case in enumerate(CASES) if case.opset == opset}
        program = saved_program(cases, opset, tmp_path_factory.mktemp("ops"))
        fed = {
            f"{key}_{name}_{i}": array.astype("float32") if array.dtype == bool else array
            for key, case in cases.items()
            for name, value in case.tensors.items()
            for i, array in enumerate(listed(value))
        }
        found |= program.run(fed)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{case}" for i, case in enumerate(CASES)])
def test_op_computes_what_coremltools_defines(results, index):
    case = CASES[index]
    if case.expected is None:
        expected = value_inference(case)
    else:
        constants = {name: case.constants[name] for name in ("weight", "bias") if name in case.constants}
        expected = [case.expected(*case.tensors.values(), **constants)]
    names = [name for name in results if name.startswith(f"c{index}_")]
    assert len(names) == len(expected)
    for i, array in enumerate(expected):
        found = results[f"c{index}_{i}"]
        assert found.shape == np.shape(array)
        assert np.std(np.float64(array)) > 0 or array.size == 1, "a case whose output is constant proves little"
        np.testing.assert_allclose(found, np.float64(array), rtol=1e-5, atol=2e-6)


def test_every_op_of_the_table_is_tested():
    assert set(OPS) == {case.op for case in CASES}
