"""Rewrites of a module that change how fast it runs and not what it computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

_CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
_BATCH_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
_CONV_OPS = {torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default}
_TOLERANCE = 1e-5


def prepare(
    module: nn.Module, form: str, example: tuple[torch.Tensor, ...], *, rewrites: Sequence[str] | None = None
) -> nn.Module:
    """A copy of `module` in the form that runs fastest in a format's runtime."""
    return fold_batch_norm(module, example)


def fold_batch_norm(module: nn.Module, example: tuple[torch.Tensor, ...]) -> nn.Module:
    """A copy of `module` (eval mode) in which each BatchNorm that follows a convolution is part of its weights.

    `example` holds forward's arguments. Which BatchNorm reads which convolution is taken from the traced graph, so it
    works whatever the modules are called and however forward is written; only plain torch classes are touched, each
    used once. A module that cannot be traced, or whose output on `example` would change by more than 1e-5 of its
    standard deviation, comes back as an unchanged copy.
    """
    original = copy.deepcopy(module).eval()
    try:
        pairs = _pairs(original, example)
    except Exception:  # whatever a stranger's module makes torch.export say: then there is nothing to fold
        return original
    if not pairs:
        return original
    folded = copy.deepcopy(original)
    for conv_name, norm_name in pairs:
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        _absorb(conv, norm)
        parent, _, child = norm_name.rpartition(".")
        setattr(folded.get_submodule(parent), child, nn.Identity())
    return folded if _same(original, folded, example) else original


def _absorb(conv: Any, norm: Any) -> None:
    """conv ← norm ∘ conv."""
    conv.weight, conv.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )


def _pairs(module: nn.Module, example: tuple[torch.Tensor, ...]) -> list[tuple[str, str]]:
    """Names of (convolution, BatchNorm) modules where the norm is the convolution's only reader."""
    program = torch.export.export(module, example, strict=False)
    signature, nodes = program.graph_signature, program.graph.nodes
    owners = dict(signature.inputs_to_parameters) | dict(signature.inputs_to_buffers)
    pairs = []
    for norm_node in nodes:
        if norm_node.target != torch.ops.aten.batch_norm.default:
            continue
        conv_node = norm_node.args[0]
        if conv_node.target not in _CONV_OPS or len(conv_node.users) != 1:
            continue
        conv_name, norm_name = _owner(conv_node, 1, owners), _owner(norm_node, 3, owners)
        if conv_name is None or norm_name is None:
            continue
        conv, norm = module.get_submodule(conv_name), module.get_submodule(norm_name)
        if type(conv) in _CONVOLUTIONS and type(norm) in _BATCH_NORMS:
            pairs.append((conv_name, norm_name))
    return pairs


def _owner(node: torch.fx.Node, argument: int, owners: dict[str, str]) -> str | None:
    """Name of the module whose tensor is that argument of `node`; None where it is computed, or read elsewhere too."""
    tensor = node.args[argument]
    name = owners.get(tensor.name) if isinstance(tensor, torch.fx.Node) and len(tensor.users) == 1 else None
    return name.rpartition(".")[0] if name else None


def _same(one: nn.Module, two: nn.Module, example: tuple[torch.Tensor, ...]) -> bool:
    with torch.no_grad():
        pairs = zip(_tensors(one(*example)), _tensors(two(*example)), strict=True)
        return all(bool((a - b).abs().max() <= _TOLERANCE * max(float(a.std()), 1e-12)) for a, b in pairs)


def _tensors(outputs: object) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for item in values for tensor in _tensors(item)]  # type: ignore[attr-defined]
