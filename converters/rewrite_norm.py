"""Normalisations: BatchNorm inside the convolution before it, LayerNorm in the operations that LiteRT runs best."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from converters.equivalence import exchange

_CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
_BATCH_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
_CONV_OPS = {torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default}


def fold_batch_norms(module: nn.Module, _form: str, example: tuple[torch.Tensor, ...]) -> nn.Module | None:
    """Makes each BatchNorm that is the only reader of a convolution part of its weights.

    Which BatchNorm reads which convolution is taken from the traced graph, so it works whatever the modules are called
    and however forward is written; only plain torch classes are touched, each used once.
    """
    if not any(type(layer) in _BATCH_NORMS for layer in module.modules()):
        return None
    pairs = _pairs(module, example)
    for conv_name, norm_name in pairs:
        conv, norm = module.get_submodule(conv_name), module.get_submodule(norm_name)
        _absorb(conv, norm)
        parent, _, child = norm_name.rpartition(".")
        setattr(module.get_submodule(parent), child, nn.Identity())
    return module if pairs else None


def spell_out_layer_norms(module: nn.Module, _form: str, example: tuple[torch.Tensor, ...]) -> nn.Module | None:
    """Writes each LayerNorm over the last dimension as two means: litert-torch's own decomposition takes more."""

    def spelt_out(layer: nn.Module, _arguments: tuple[Any, ...]) -> nn.Module | None:
        suits = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1 and layer.weight is not None
        return SpeltOutLayerNorm(layer) if suits else None  # type: ignore[arg-type]

    return module if exchange(module, example, spelt_out) else None


class SpeltOutLayerNorm(nn.Module):
    """LayerNorm over the last dimension of (…, d)."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        scaled = centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + self.eps) * self.weight
        return scaled if self.bias is None else scaled + self.bias


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
