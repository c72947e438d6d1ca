"""Linear layers and attention on tokens (N, L, d)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from converters.equivalence import exchange


def flatten_linears(module: nn.Module, _form: str, example: tuple[Tensor, ...]) -> nn.Module | None:
    """Runs linear layers on (N · L, d): two dimensions are one Gemm in ONNX, three a MatMul and an Add."""

    def flat(layer: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
        if type(layer) is not nn.Linear or len(arguments) != 1 or arguments[0].dim() < 3:
            return None
        linear = FlatLinear(layer.in_features, layer.out_features, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        return linear

    return module if exchange(module, example, flat) else None


class FlatLinear(nn.Linear):
    """(…, in) → (…, out) through a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)


def split_attentions(module: nn.Module, _form: str, example: tuple[Tensor, ...]) -> nn.Module | None:
    """Takes the joint `qkv` layer of attention as timm and its descendants write it apart, and writes the rest plainly."""

    def split(layer: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
        qkv, out, heads = (getattr(layer, name, None) for name in ("qkv", "proj", "num_heads"))
        suits = type(qkv) is nn.Linear and type(out) is nn.Linear and isinstance(heads, int)
        joint = suits and qkv.out_features == 3 * qkv.in_features == 3 * out.in_features
        return PlainAttention(qkv, out, heads) if joint and arguments and arguments[0].dim() == 3 else None

    return module if exchange(module, example, split) else None


class PlainAttention(nn.Module):
    """softmax(Q Kᵀ / √d_head) V with 1/√d_head inside the query's weights. (N, L, d) in and out."""

    def __init__(self, qkv: nn.Linear, out: nn.Linear, num_heads: int) -> None:
        super().__init__()
        dim = qkv.in_features
        self.head_dim = dim // num_heads
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=qkv.bias is not None) for _ in range(3))
        for number, linear in enumerate((self.query, self.key, self.value)):
            scale = self.head_dim**-0.5 if linear is self.query else 1.0
            linear.weight.copy_(scale * qkv.weight[number * dim : (number + 1) * dim])
            if qkv.bias is not None:
                linear.bias.copy_(scale * qkv.bias[number * dim : (number + 1) * dim])
        self.out = copy.deepcopy(out)

    def forward(self, x: Tensor, *_unused: None) -> Tensor:
        def split_heads(x: Tensor) -> Tensor:  # → (N, heads, L, d_head)
            return x.reshape(batch, length, -1, self.head_dim).transpose(1, 2)

        batch, length, dim = x.shape
        query, key, value = split_heads(self.query(x)), split_heads(self.key(x)), split_heads(self.value(x))
        mixed = (query @ key.transpose(-2, -1)).softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
