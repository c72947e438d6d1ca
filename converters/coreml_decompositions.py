"""Ops of torch that coremltools 9 cannot read, or reads wrongly in silence, in terms of those that it reads rightly.

What it gets wrong: gelu(approximate="tanh") becomes the exact form; add and sub drop `alpha`; reciprocal adds 1e-4 to
what it divides by. tests/converters/test_coreml_functions.py compares every function with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.quiet import quiet

with quiet():  # private, and tied to coremltools 9
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `ExportedProgram.run_decompositions`; every other op stays whole, since Core ML has large ones too."""
    aten = torch.ops.aten
    recurrent = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
    return {
        **torch._decomp.get_decompositions(recurrent),
        aten.gelu.default: _gelu,
        aten.add.Tensor: _with_alpha(torch.add),
        aten.sub.Tensor: _with_alpha(torch.sub),
        aten.reciprocal.default: lambda x: torch.div(torch.ones_like(x), x),
        aten.__and__.Tensor: _on_truth(torch.logical_and),
        aten.__or__.Tensor: _on_truth(torch.logical_or),
        aten.celu.default: lambda x, alpha=1.0: alpha * F.elu(x / alpha),
        aten.channel_shuffle.default: lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2),
        aten.log_sigmoid.default: lambda x: -F.softplus(-x),
        aten.rms_norm.default: _rms_norm,
        aten.trunc.default: _trunc,
        aten.div.Tensor_mode: _divided,
        aten.alias.default: lambda x: x.view(x.shape),
    }


def torchs_own(program: torch.export.ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of those ops of `program` for which coremltools has no conversion."""
    names = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    table = torch.export.default_decompositions()
    return {op: table[op] for op in names if sanitize_op_kind(op.name()) not in _TORCH_OPS_REGISTRY and op in table}


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Spelled out, coremltools finds the form and makes one op of it."""
    if approximate != "tanh":
        return NotImplemented
    inner = (x + torch.pow(x, 3.0) * 0.044715) * (2 / torch.pi) ** 0.5
    return x * ((torch.tanh(inner) + 1.0) * 0.5)


def _with_alpha(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def decomposed(x: Tensor, other: Tensor, alpha: float = 1) -> Tensor:
        return NotImplemented if alpha == 1 else function(x, other * alpha)

    return decomposed


def _on_truth(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Bits of integers have no counterpart."""

    def decomposed(x: Tensor, other: Tensor) -> Tensor:
        return function(x, other) if x.dtype == other.dtype == torch.bool else NotImplemented

    return decomposed


def _trunc(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.floor(torch.abs(x))


def _divided(x: Tensor, other: Tensor, rounding_mode: str | None) -> Tensor:
    """coremltools takes the mode for the value of that name, where the graph has one."""
    if not x.is_floating_point() or rounding_mode is None:
        return NotImplemented
    quotient = torch.div(x, other)
    return torch.floor(quotient) if rounding_mode == "floor" else _trunc(quotient)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = list(range(-len(shape), 0))
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * torch.rsqrt((x * x).mean(axes, keepdim=True) + epsilon)
    return y if weight is None else y * weight
