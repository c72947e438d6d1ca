"""Core ML ops that are layers: convolution, pooling, linear algebra, attention and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.mil_table import OPS, Function, Op, op

# Convolution and pooling


@op("x", "weight", "bias?")
def conv(
    *,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Function:
    padding = _padding_rule(pad_type, pad)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rank = x.dim() - 2
        stride, dilation = strides or [1] * rank, dilations or [1] * rank
        pairs = padding(x.shape[2:], weight.shape[2:], stride, dilation)
        if all(before == after for before, after in pairs):
            around = [before for before, _ in pairs]
        else:
            x, around = padded(x, pairs), [0] * rank
        function: Function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        return function(x, weight, bias, stride, around, dilation, groups)

    return run


@op("x", "weight", "bias?")
def conv_transpose(
    *,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
    output_shape: list[int] | None = None,
) -> Function:
    """Padding is cut off the whole result; where `output_shape` asks for more than that leaves, zeros follow it."""
    if pad_type not in ("valid", "custom", "same"):
        raise NotImplementedError(f"pad_type {pad_type!r}")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rank = x.dim() - 2
        stride, dilation = strides or [1] * rank, dilations or [1] * rank
        function: Function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        y = function(x, weight, None, stride, 0, 0, groups, dilation)
        for axis in range(rank):
            whole, before, after = y.shape[2 + axis], 0, 0
            if pad_type == "custom" and pad:
                before, after = pad[2 * axis : 2 * axis + 2]
            elif pad_type == "same":
                surplus = max(0, whole - x.shape[2 + axis] * stride[axis])
                before, after = surplus // 2, surplus - surplus // 2
            size = output_shape[2 + axis] if output_shape else whole - before - after
            y = y.narrow(2 + axis, before, min(size, whole - before))
            y = F.pad(y, [0, 0] * (rank - 1 - axis) + [0, size - y.shape[2 + axis]])
        return y if bias is None else y + bias.reshape(-1, *[1] * rank)

    return run


@op("x", selects=True)
def max_pool(
    *,
    kernel_sizes: list[int],
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    ceil_mode: bool = False,
) -> Function:
    stride, padding = strides or [1] * len(kernel_sizes), _padding_rule(pad_type, pad)
    function: Function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel_sizes) - 1]

    def run(x: Tensor) -> Tensor:
        x, around = _pool_padded(x, kernel_sizes, stride, padding, -math.inf, ceil_mode)
        return function(x, kernel_sizes, stride, around, ceil_mode=ceil_mode)

    return run


@op("x")
def avg_pool(
    *,
    kernel_sizes: list[int],
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Function:
    stride, padding = strides or [1] * len(kernel_sizes), _padding_rule(pad_type, pad)
    function: Function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel_sizes) - 1]

    def average(x: Tensor) -> Tensor:
        x, around = _pool_padded(x, kernel_sizes, stride, padding, 0.0, ceil_mode)
        return function(x, kernel_sizes, stride, around, ceil_mode, True)

    if exclude_padding_from_average:
        return lambda x: average(x) / average(torch.ones_like(x))
    return average


@op("x")
def l2_pool(**window: Any) -> Function:
    """The root of the sum of squares in each window."""
    volume = math.prod(window["kernel_sizes"])
    average = OPS["avg_pool"].make(**window)
    return lambda x: (average(x * x) * volume).sqrt()


Pairs = list[tuple[int, int]]  # (before, after) of each spatial dimension


def _padding_rule(pad_type: str, pad: list[int] | None) -> Callable[..., Pairs]:
    """A function of the spatial sizes, kernel, strides and dilations that gives the padding.

    `same` keeps ceil(size / stride) outputs and puts an odd element behind, `same_lower` before.
    """
    if pad_type == "valid":
        return lambda size, kernel, stride, dilation: [(0, 0)] * len(size)
    if pad_type == "custom":
        custom = pad or []
        pairs = list(zip(custom[::2], custom[1::2], strict=True))
        return lambda size, kernel, stride, dilation: pairs or [(0, 0)] * len(size)
    if pad_type not in ("same", "same_lower"):
        raise NotImplementedError(f"pad_type {pad_type!r}")

    def same(size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Pairs:
        result = []
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
            total = max(0, (math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n)
            less, more = total // 2, total - total // 2
            result.append((less, more) if pad_type == "same" else (more, less))
        return result

    return same


def padded(x: Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """`x` with (before, after) elements around each of its last dimensions; torch counts them from the last one."""
    return F.pad(x, [amount for pair in reversed(pairs) for amount in pair], value=value)


def _pool_padded(
    x: Tensor, kernel: list[int], stride: list[int], padding: Callable[..., Pairs], value: float, ceil_mode: bool
) -> tuple[Tensor, list[int]]:
    """`x` and torch's `padding` argument: symmetric, at most half a kernel. Other padding goes around x."""
    pairs = padding(x.shape[2:], kernel, stride, [1] * len(kernel))
    if all(before == after <= k // 2 for (before, after), k in zip(pairs, kernel, strict=True)):
        return x, [before for before, _ in pairs]
    if ceil_mode:
        raise NotImplementedError("ceil_mode with asymmetric padding, or padding of more than half a kernel")
    return padded(x, pairs, value), [0] * len(kernel)


# Linear algebra and normalisation

OPS["linear"] = Op(("x", "weight", "bias?"), lambda: F.linear)
OPS["scaled_dot_product_attention"] = Op(
    ("query", "key", "value", "attn_mask?"), lambda: F.scaled_dot_product_attention
)


@op("x", "y")
def matmul(*, transpose_x: bool = False, transpose_y: bool = False) -> Function:
    return lambda x, y: torch.matmul(x.mT if transpose_x else x, y.mT if transpose_y else y)


@op("*values")
def einsum(*, equation: str) -> Function:
    return lambda values: torch.einsum(equation, *values)


@op("x", "mean", "variance", "gamma?", "beta?")
def batch_norm(*, epsilon: float = 1e-5) -> Function:
    return lambda x, mean, variance, gamma, beta: F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)


@op("x", "gamma?", "beta?")
def layer_norm(*, axes: list[int] | None = None, epsilon: float = 1e-5) -> Function:
    def run(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        dims = sorted(axis % x.dim() for axis in (range(x.dim()) if axes is None else axes))
        last = list(range(-len(dims), 0))
        y = x.movedim(dims, last)
        return F.layer_norm(y, y.shape[-len(dims) :], gamma, beta, epsilon).movedim(last, dims)

    return run


@op("x", "gamma?", "beta?")
def instance_norm(*, epsilon: float = 1e-5) -> Function:
    return lambda x, gamma, beta: F.instance_norm(x, weight=gamma, bias=beta, eps=epsilon)


@op("x")
def l2_norm(*, epsilon: float = 1e-6) -> Function:
    """Over the last three dimensions together."""
    return lambda x: x / ((x * x).sum((-3, -2, -1), keepdim=True) + epsilon).sqrt()


@op("x")
def local_response_norm(*, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Function:
    return lambda x: F.local_response_norm(x, size, alpha, beta, k)
