"""Core ML ops on elements, and reductions, sorting and sums along axes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.mil_table import OPS, Function, Op, op, plain

# acos … tanh are torch functions of the same name.
_UNARY = "acos asin atan atanh ceil cos cosh erf exp exp2 floor logical_not round sigmoid sign sin sinh"
for _name in (*_UNARY.split(), "sqrt", "square", "tan", "tanh"):
    plain({_name: getattr(torch, _name)}, "x")
plain({"silu": F.silu, "softsign": F.softsign}, "x")
plain({"softplus": lambda x: F.softplus(x, threshold=math.inf)}, "x")
plain({"abs": torch.abs, "identity": lambda x: x, "relu": F.relu, "relu6": F.relu6}, "x", selects=True)
plain({"add": torch.add, "mul": torch.mul, "pow": torch.pow, "real_div": torch.div, "sub": torch.sub}, "x", "y")
plain({"floor_div": torch.floor_divide, "mod": torch.remainder}, "x", "y")
plain({"equal": torch.eq, "greater": torch.gt, "greater_equal": torch.ge}, "x", "y")
plain({"less": torch.lt, "less_equal": torch.le, "not_equal": torch.ne}, "x", "y")
plain({f"logical_{how}": getattr(torch, f"logical_{how}") for how in ("and", "or", "xor")}, "x", "y")
plain({"maximum": torch.maximum, "minimum": torch.minimum}, "x", "y", selects=True)
plain({"select": torch.where}, "cond", "a", "b", selects=True)

# 16-bit unsigned numbers are held in 32 bits, since torch computes hardly anything on them.
CAST_TYPES = {
    "bool": torch.bool,
    "fp16": torch.float32,  # held in fp32; the caller rounds
    "fp32": torch.float32,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "uint16": torch.int32,
}


@op("x")
def cast(*, dtype: str) -> Function:
    if dtype not in CAST_TYPES:
        raise NotImplementedError(f"dtype {dtype!r}")
    if dtype == "uint16":
        return lambda x: x.to(torch.int32) & 0xFFFF
    return lambda x: x.to(CAST_TYPES[dtype])


# Activations


@op("x", selects=True)
def clip(*, alpha: float, beta: float) -> Function:
    return lambda x: x.clamp(alpha, beta)


@op("x")
def clamped_relu(*, alpha: float, beta: float) -> Function:
    return lambda x: torch.where(x >= 0, x, alpha * x).clamp(max=beta)


@op("x")
def elu(*, alpha: float) -> Function:
    return lambda x: F.elu(x, alpha)


@op("x")
def gelu(*, mode: str = "EXACT") -> Function:
    if mode == "SIGMOID_APPROXIMATION":
        return lambda x: x * torch.sigmoid(1.702 * x)
    if mode not in ("EXACT", "TANH_APPROXIMATION"):
        raise NotImplementedError(f"mode {mode!r}")
    approximate = "tanh" if mode == "TANH_APPROXIMATION" else "none"
    return lambda x: F.gelu(x, approximate=approximate)


@op("x")
def inverse(*, epsilon: float = 1e-4) -> Function:
    return lambda x: 1 / (x + epsilon)


@op("x")
def leaky_relu(*, alpha: float) -> Function:
    return lambda x: F.leaky_relu(x, alpha)


@op("x")
def linear_activation(*, alpha: float, beta: float) -> Function:
    return lambda x: alpha * x + beta


@op("x")
def log(*, epsilon: float = 1e-45) -> Function:
    return lambda x: torch.log(x + epsilon)


@op("x", "alpha")
def prelu() -> Function:
    return lambda x, alpha: F.prelu(x, alpha)


@op("x")
def rsqrt(*, epsilon: float = 1e-12) -> Function:
    return lambda x: torch.rsqrt(x + epsilon)


@op("x")
def scaled_tanh(*, alpha: float, beta: float) -> Function:
    return lambda x: alpha * torch.tanh(beta * x)


@op("x")
def sigmoid_hard(*, alpha: float, beta: float) -> Function:
    return lambda x: (alpha * x + beta).clamp(0, 1)


@op("x")
def softmax(*, axis: int = -1) -> Function:
    return lambda x: F.softmax(x, axis)


@op("x", "alpha", "beta")
def softplus_parametric() -> Function:
    def run(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        alpha, beta = (value.reshape(-1, *[1] * (x.dim() - 2)) for value in (alpha, beta))
        return alpha * F.softplus(beta * x, threshold=math.inf)

    return run


@op("x", selects=True)
def threshold(*, alpha: float) -> Function:
    return lambda x: x.clamp(min=alpha)


@op("x", selects=True)
def thresholded_relu(*, alpha: float) -> Function:
    return lambda x: torch.where(x >= alpha, x, 0.0)


# Along axes


def _reduction(function: Function, selects: bool = False) -> Op:
    def make(*, axes: list[int] | None = None, keep_dims: bool = False) -> Function:
        return lambda x: function(x, tuple(range(x.dim())) if axes is None else axes, keepdim=keep_dims)

    return Op(("x",), make, selects)


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdim, dtype=x.dtype)  # torch would give int64 for int32


def _prod(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdim, dtype=x.dtype)
    return x


OPS["reduce_max"] = _reduction(torch.amax, selects=True)
OPS["reduce_min"] = _reduction(torch.amin, selects=True)
OPS["reduce_mean"] = _reduction(torch.mean)
OPS["reduce_sum"] = _reduction(_sum)
OPS["reduce_prod"] = _reduction(_prod)
OPS["reduce_l1_norm"] = _reduction(lambda x, axes, keepdim: _sum(x.abs(), axes, keepdim))
OPS["reduce_l2_norm"] = _reduction(lambda x, axes, keepdim: _sum(x * x, axes, keepdim).sqrt())
OPS["reduce_sum_square"] = _reduction(lambda x, axes, keepdim: _sum(x * x, axes, keepdim))
OPS["reduce_log_sum"] = _reduction(lambda x, axes, keepdim: _sum(x, axes, keepdim).log())
OPS["reduce_log_sum_exp"] = _reduction(torch.logsumexp)

_INDEX_TYPES = {"int32": torch.int32, "uint16": torch.int32}  # as they are held


def _arg(function: Function) -> Op:
    def make(*, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Function:
        return lambda x: function(x, axis, keepdim=keep_dims).to(_INDEX_TYPES[output_dtype])

    return Op(("x",), make)


OPS["reduce_argmax"] = _arg(torch.argmax)
OPS["reduce_argmin"] = _arg(torch.argmin)


@op("x", selects=True)
def argsort(*, axis: int = -1, ascending: bool = False) -> Function:
    """Equal elements keep their order."""
    return lambda x: torch.argsort(x, dim=axis, descending=not ascending, stable=True).int()


@op("x", selects=True)
def topk(
    *,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> Function:
    """Of equal elements the first comes first. What order `sort` False gives is not written down."""
    if not sort:
        raise NotImplementedError("sort False")

    def run(x: Tensor) -> tuple[Tensor, ...]:
        values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
        chosen = values.narrow(axis, 0, k), indices.narrow(axis, 0, k).to(_INDEX_TYPES[output_indices_dtype])
        return chosen if return_indices else chosen[:1]

    return run


@op("x")
def cumsum(*, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Function:
    def run(x: Tensor) -> Tensor:
        y = x.flip(axis) if reverse else x
        total = torch.cumsum(y, axis, dtype=x.dtype)
        if exclusive:
            total = torch.cat([torch.zeros_like(y.narrow(axis, 0, 1)), total.narrow(axis, 0, y.shape[axis] - 1)], axis)
        return total.flip(axis) if reverse else total

    return run


@op("x", selects=True)
def band_part(*, lower: int = -1, upper: int = -1) -> Function:
    def run(x: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])
        inside = torch.ones(x.shape[-2:], dtype=torch.bool)
        if lower >= 0:
            inside &= rows - columns <= lower
        if upper >= 0:
            inside &= columns - rows <= upper
        return torch.where(inside, x, torch.zeros((), dtype=x.dtype))

    return run
