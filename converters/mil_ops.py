"""What each op of a Core ML program computes, in torch and fp32.

Sources: the docstrings and value inference in coremltools.converters.mil.mil.ops.defs (coremltools 9.0).

An op is built in two steps. At load, `make` takes the op's constant arguments (strides, axes, modes, …) by MIL's names
and refuses with NotImplementedError what it does not know. What it returns is called at every run with the tensors
alone. An op or argument that is not here is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]  # tensors → a tensor, or a sequence of tensors


@dataclass(frozen=True)
class Op:
    """One op of the table.

    `inputs` names the tensor arguments in the order of the call; "name?" may be missing, "*name" is a list.
    `selects` says that every output element is an input element or a constant of the program, so that rounding the
    output to the inputs' type once more would change nothing.
    """

    inputs: tuple[str, ...]
    make: Callable[..., Function]
    selects: bool = False


OPS: dict[str, Op] = {}


def _op(*inputs: str, selects: bool = False) -> Callable[[Callable[..., Function]], Callable[..., Function]]:
    def add(make: Callable[..., Function]) -> Callable[..., Function]:
        OPS[make.__name__.rstrip("_")] = Op(inputs, make, selects)
        return make

    return add


def _elementwise(table: dict[str, Function], *inputs: str, selects: bool = False) -> None:
    for name, function in table.items():
        OPS[name] = Op(inputs, lambda function=function: function, selects)


for _name in ("erf", "exp", "logical_not", "sigmoid", "sqrt", "square", "tanh"):
    _elementwise({_name: getattr(torch, _name)}, "x")
_elementwise({"silu": F.silu}, "x")
_elementwise({"abs": torch.abs, "identity": lambda x: x, "relu": F.relu, "relu6": F.relu6}, "x", selects=True)
_elementwise({"add": torch.add, "mul": torch.mul, "pow": torch.pow, "real_div": torch.div, "sub": torch.sub}, "x", "y")
_elementwise({"equal": torch.eq, "greater": torch.gt, "greater_equal": torch.ge}, "x", "y")
_elementwise({"less": torch.lt, "less_equal": torch.le, "not_equal": torch.ne}, "x", "y")
_elementwise({"logical_and": torch.logical_and, "logical_or": torch.logical_or}, "x", "y")
_elementwise({"maximum": torch.maximum, "minimum": torch.minimum}, "x", "y", selects=True)
_elementwise({"select": torch.where}, "cond", "a", "b", selects=True)

CAST_TYPES = {
    "bool": torch.bool,
    "fp16": torch.float32,  # held in fp32; the caller rounds
    "fp32": torch.float32,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
}


@_op("x")
def cast(*, dtype: str) -> Function:
    if dtype not in CAST_TYPES:
        raise NotImplementedError(f"dtype {dtype!r}")
    return lambda x: x.to(CAST_TYPES[dtype])


# Activations


@_op("x", selects=True)
def clip(*, alpha: float, beta: float) -> Function:
    return lambda x: x.clamp(alpha, beta)


@_op("x")
def gelu(*, mode: str = "EXACT") -> Function:
    if mode == "SIGMOID_APPROXIMATION":
        return lambda x: x * torch.sigmoid(1.702 * x)
    if mode not in ("EXACT", "TANH_APPROXIMATION"):
        raise NotImplementedError(f"mode {mode!r}")
    approximate = "tanh" if mode == "TANH_APPROXIMATION" else "none"
    return lambda x: F.gelu(x, approximate=approximate)


@_op("x")
def rsqrt(*, epsilon: float = 1e-12) -> Function:
    return lambda x: torch.rsqrt(x + epsilon)


@_op("x")
def sigmoid_hard(*, alpha: float, beta: float) -> Function:
    return lambda x: (alpha * x + beta).clamp(0, 1)


@_op("x")
def softmax(*, axis: int) -> Function:
    return lambda x: F.softmax(x, axis)


@_op("x", selects=True)
def thresholded_relu(*, alpha: float) -> Function:
    return lambda x: torch.where(x >= alpha, x, 0.0)


# Convolution and pooling


@_op("x", "weight", "bias?")
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
            x, around = _padded(x, pairs), [0] * rank
        function: Function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        return function(x, weight, bias, stride, around, dilation, groups)

    return run


@_op("x", selects=True)
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


@_op("x")
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


def _padded(x: Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
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
    return _padded(x, pairs, value), [0] * len(kernel)


# Linear algebra, normalisation, reductions

OPS["linear"] = Op(("x", "weight", "bias?"), lambda: F.linear)
OPS["scaled_dot_product_attention"] = Op(
    ("query", "key", "value", "attn_mask?"), lambda: F.scaled_dot_product_attention
)


@_op("x", "y")
def matmul(*, transpose_x: bool = False, transpose_y: bool = False) -> Function:
    return lambda x, y: torch.matmul(x.mT if transpose_x else x, y.mT if transpose_y else y)


@_op("x", "mean", "variance", "gamma?", "beta?")
def batch_norm(*, epsilon: float = 1e-5) -> Function:
    return lambda x, mean, variance, gamma, beta: F.batch_norm(x, mean, variance, gamma, beta, eps=epsilon)


@_op("x", "gamma?", "beta?")
def layer_norm(*, axes: list[int] | None = None, epsilon: float = 1e-5) -> Function:
    def run(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        dims = sorted(axis % x.dim() for axis in (range(x.dim()) if axes is None else axes))
        last = list(range(-len(dims), 0))
        y = x.movedim(dims, last)
        return F.layer_norm(y, y.shape[-len(dims) :], gamma, beta, epsilon).movedim(last, dims)

    return run


def _reduction(function: Function, selects: bool = False) -> Op:
    def make(*, axes: list[int] | None = None, keep_dims: bool = False) -> Function:
        return lambda x: function(x, tuple(range(x.dim())) if axes is None else axes, keepdim=keep_dims)

    return Op(("x",), make, selects)


OPS["reduce_max"] = _reduction(torch.amax, selects=True)
OPS["reduce_mean"] = _reduction(torch.mean)
OPS["reduce_min"] = _reduction(torch.amin, selects=True)
OPS["reduce_sum"] = _reduction(torch.sum)


# Shapes and elements


@_op("x", selects=True)
def reshape(*, shape: list[int]) -> Function:
    return lambda x: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


@_op("x", selects=True)
def transpose(*, perm: list[int]) -> Function:
    return lambda x: x.permute(perm)


@_op("x", selects=True)
def expand_dims(*, axes: list[int]) -> Function:
    def run(x: Tensor) -> Tensor:
        rank = x.dim() + len(axes)
        for axis in sorted(axis % rank for axis in axes):
            x = x.unsqueeze(axis)
        return x

    return run


@_op("x", selects=True)
def squeeze(*, axes: list[int] | None = None) -> Function:
    return lambda x: x.squeeze() if axes is None else x.squeeze(axes)


@_op("*values", selects=True)
def concat(*, axis: int, interleave: bool = False) -> Function:
    if interleave:
        raise NotImplementedError("interleave")
    return lambda values: torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values], axis)


@_op("*values", selects=True)
def stack(*, axis: int) -> Function:
    return lambda values: torch.stack(values, axis)


@_op("x", selects=True)
def split(*, axis: int, num_splits: int | None = None, split_sizes: list[int] | None = None) -> Function:
    def run(x: Tensor) -> Sequence[Tensor]:
        sizes = split_sizes or [x.shape[axis] // (num_splits or 1)] * (num_splits or 1)
        return x.split(sizes, axis)

    return run


@_op("x", selects=True)
def slice_by_index(
    *,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    squeeze_mask: list[bool] | None = None,
) -> Function:
    steps, whole = stride or [1] * len(begin), [False] * len(begin)
    if min(steps) < 1:
        raise NotImplementedError(f"stride {steps}")
    masks = zip(begin_mask or whole, end_mask or whole, squeeze_mask or whole, strict=True)
    index = tuple(
        first if drop else slice(None if from_start else first, None if to_end else last, step)
        for first, last, step, (from_start, to_end, drop) in zip(begin, end, steps, masks, strict=True)
    )
    return lambda x: x[index]


@_op("x", selects=True)
def slice_by_size(*, begin: list[int], size: list[int]) -> Function:
    def run(x: Tensor) -> Tensor:
        starts = [first % n for first, n in zip(begin, x.shape, strict=True)]
        return x[tuple(slice(a, None if n == -1 else a + n) for a, n in zip(starts, size, strict=True))]

    return run


@_op("x", selects=True)
def pad(*, pad: list[int], mode: str = "constant", constant_val: float = 0.0) -> Function:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        return lambda x: _padded(x, pairs, constant_val)
    if mode not in ("reflect", "replicate"):
        raise NotImplementedError(f"mode {mode!r}")
    while pairs and pairs[0] == (0, 0):
        del pairs[0]
    if len(pairs) > 3:
        raise NotImplementedError(f"mode {mode!r} over more than the last three dimensions")

    def run(x: Tensor) -> Tensor:
        # torch takes these modes with exactly two dimensions before the padded ones.
        shape = x.shape[-len(pairs) :]
        y = F.pad(x.reshape(1, -1, *shape), [amount for pair in reversed(pairs) for amount in pair], mode=mode)
        return y.reshape(*x.shape[: -len(pairs)], *y.shape[2:])

    return run


@_op("x", selects=True)
def tile(*, reps: list[int]) -> Function:
    return lambda x: x.repeat(reps)


@_op("x", "indices", selects=True)
def gather(*, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Function:
    """An index out of range raises here, validated or not: what the hardware would return is undefined."""
    if batch_dims:
        raise NotImplementedError(f"batch_dims {batch_dims}")

    def run(x: Tensor, indices: Tensor) -> Tensor:
        dim = axis % x.dim()
        index = indices.long()
        index = torch.where(index < 0, index + x.shape[dim], index)
        return x.index_select(dim, index.flatten()).reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])

    return run


# Image resizing


@_op("x")
def upsample_bilinear(
    *,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Function:
    if half_pixel_centers not in (None, not align_corners):
        raise NotImplementedError(f"align_corners {align_corners} with half_pixel_centers {half_pixel_centers}")
    return lambda x: _resized(
        x, _scaled(x, scale_factor_height, scale_factor_width), mode="bilinear", align_corners=align_corners
    )


@_op("x")
def resize_bilinear(
    *, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Function:
    """STRICT_ALIGN_CORNERS and UNALIGN_CORNERS are torch's two grids; ALIGN_CORNERS differs for an output of one."""
    size = (target_size_height, target_size_width)
    aligned = {"STRICT_ALIGN_CORNERS": True, "UNALIGN_CORNERS": False} | (
        {"ALIGN_CORNERS": True} if 1 not in size else {}
    )
    if sampling_mode not in aligned:
        raise NotImplementedError(f"sampling_mode {sampling_mode!r} to size {size}")
    return lambda x: _resized(x, size, mode="bilinear", align_corners=aligned[sampling_mode])


@_op("x", selects=True)
def upsample_nearest_neighbor(*, scale_factor_height: float = 1, scale_factor_width: float = 1) -> Function:
    if scale_factor_height != int(scale_factor_height) or scale_factor_width != int(scale_factor_width):
        raise NotImplementedError(f"fractional scale factors {scale_factor_height} and {scale_factor_width}")
    return lambda x: _resized(x, _scaled(x, scale_factor_height, scale_factor_width), mode="nearest")


def _scaled(x: Tensor, height: float, width: float) -> tuple[int, int]:
    """floor(size × factor), in fp32 as the definition of the op computes it."""
    return math.floor(np.float32(height) * x.shape[-2]), math.floor(np.float32(width) * x.shape[-1])


def _resized(x: Tensor, size: tuple[int, int], **how: Any) -> Tensor:
    y = F.interpolate(x.reshape(1, -1, *x.shape[-2:]), size, **how)
    return y.reshape(*x.shape[:-2], *size)
