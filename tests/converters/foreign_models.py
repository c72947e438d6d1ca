"""Modules as strangers write them: other kinds of inputs and outputs, and operations that converters lack."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from converters.signature import Dim, Signature, TensorSpec


class Ports(nn.Module):
    """Outputs in another order than their names', one of them an input, one returned twice; whole and truth inputs."""

    signature = Signature(
        inputs=(
            TensorSpec("tokens", ("batch", 3), "int64", "tokens"),
            TensorSpec("keep", ("batch", 3), "bool", "mask"),
            TensorSpec("x", ("batch", 3, 4)),
        ),
        outputs=(
            TensorSpec("zeta", ("batch", 3, 4)),
            TensorSpec("same", ("batch", 3, 4)),
            TensorSpec("alpha", ("batch", 3, 4)),
            TensorSpec("again", ("batch", 3, 4)),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor, keep: Tensor, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x) + self.embedding(tokens) * keep[..., None].float()
        return {"zeta": y, "same": x, "alpha": 2 * y, "again": y}


class Attention(nn.Module):
    """Fused attention over patches, and one token picked by its index; `image` (N, 3, 16, 16) → `logits` (N, 5)."""

    signature = Signature(
        inputs=(TensorSpec("image", ("batch", 3, 16, 16), "float32", "image"),),
        outputs=(TensorSpec("logits", ("batch", 5), "float32", "logits"),),
    )

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.qkv = nn.Linear(32, 96)
        self.head = nn.Linear(32, 5)

    def forward(self, image: Tensor) -> Tensor:
        N = image.shape[0]
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).reshape(N, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(N, 16, 32)
        return self.head(mixed[:, 3] + mixed[:, -1])


class Steep(nn.Module):
    """A product that reaches about `peak` for inputs near 1, and comes back to where logits live."""

    signature = Signature(
        inputs=(TensorSpec("x", ("batch", 32)),), outputs=(TensorSpec("y", ("batch", 32), "float32", "logits"),)
    )

    def __init__(self, peak: float) -> None:
        super().__init__()
        self.peak = peak
        self.first, self.climb, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        high = self.climb(self.first(x)) * self.peak
        return self.last(high / self.peak)


class Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.transpose(-2, -1))  # the line to name


class Undecided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x  # another line to name


class Blocks(nn.Module):
    """`x` (N, 4, 4) through a linear layer and then `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), inner])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def square_signature(*outputs: int | str) -> Signature:
    return Signature(inputs=(TensorSpec("x", ("batch", 4, 4)),), outputs=(TensorSpec("y", ("batch", *outputs)),))


class OneBatch(nn.Module):
    """Knows only batches of the size that it was traced with."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(list(x)), 4, 4) * len(list(x))


class OneHeight(nn.Module):
    signature = Signature(
        inputs=(TensorSpec("x", ("batch", 1, "height", 8)),),
        outputs=(TensorSpec("y", ("batch", 1, "height", 8)),),
        dims=(Dim("height", minimum=4, multiple_of=4),),
    )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([row * (number + 1) for number, row in enumerate(x.split(1, dim=2))], dim=2)
