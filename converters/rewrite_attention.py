"""Attention whose queries, keys and values come from one layer, taken apart."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from converters.equivalence import exchange


def split_attentions(module: nn.Module, _form: str, example: tuple[Tensor, ...]) -> nn.Module | None:
    """Gives attention as timm and its descendants write it a layer each for queries, keys and values.

    The joint layer's output would be cut up and squeezed in the file; the scale goes into the query's weights.
    """

    def split(layer: nn.Module, arguments: tuple[Any, ...]) -> nn.Module | None:
        qkv, out, heads = (getattr(layer, name, None) for name in ("qkv", "proj", "num_heads"))
        if not (isinstance(qkv, nn.Linear) and isinstance(out, nn.Linear) and isinstance(heads, int)):
            return None
        joint = qkv.out_features == 3 * qkv.in_features == 3 * out.in_features
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

    def forward(self, x: Tensor, *_unused: None, **_options: object) -> Tensor:
        def split_heads(x: Tensor) -> Tensor:  # → (N, heads, L, d_head)
            return x.reshape(batch, length, -1, self.head_dim).transpose(1, 2)

        batch, length, dim = x.shape
        query, key, value = split_heads(self.query(x)), split_heads(self.key(x)), split_heads(self.value(x))
        mixed = (query @ key.transpose(-2, -1)).softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
