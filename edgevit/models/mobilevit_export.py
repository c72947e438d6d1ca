"""MobileViT as the runtimes like it: the same function, in fewer and cheaper operations. docs/speed.md has the figures.

What changes, and why nothing is computed differently:

- BatchNorm is part of the convolution before it.
- 1×1 convolutions around the transformer are linear layers on tokens; they commute with a bilinear resize, whose
  weights sum to 1.
- Tokens are ordered (patch, image, place in the patch). One permutation of the map then makes them, and queries, keys
  and values reach the matrix products as views that ONNX Runtime reads without copying.
- 1/√d_head is part of the query's weights. A key's bias adds the same to all scores of a query, which softmax ignores;
  a value's bias passes through softmax, whose rows sum to 1, into the output's bias.
- LayerNorm's scale and shift are part of the linear layers that read it. For LiteRT, which has no such operation, it
  becomes x / rms(x): whatever writes to the tokens is centred over the channels, so that their mean is zero by itself.
- A convolution of two joined maps is the sum of two convolutions, and the maps need not be joined.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from edgevit.models.mobilevit import (
    NUM_HEADS,
    PATCH,
    Attention,
    ConvNormAct,
    MobileViT,
    MobileViTBlock,
    TransformerLayer,
    is_one,
    resize,
    surely_has_size,
)


@torch.no_grad()
def export_form(model: MobileViT, form: str) -> nn.Module:
    """A copy of `model` for "onnx" or "tflite"; for any other format the network as it is, with BatchNorm folded.

    What pays on Apple's Neural Engine was not measured, so Core ML gets the plain form.
    """
    lean = copy.deepcopy(model).eval()
    for module in lean.modules():
        if isinstance(module, ConvNormAct):
            module.conv, module.norm = fuse_conv_bn_eval(module.conv, module.norm), nn.Identity()  # type: ignore[assignment]
    if form in ("onnx", "tflite"):
        for stage in (lean.stage3, lean.stage4, lean.stage5):
            block = cast(MobileViTBlock, stage[1])
            stage[1] = LeanBlock(block, centred=form == "tflite")
    return lean


class LeanBlock(nn.Module):
    """A `MobileViTBlock` whose BatchNorms are folded. (N, C, H, W) in and out.

    With `centred`, tokens have zero mean over their channels, and every normalisation relies on it.
    """

    def __init__(self, block: MobileViTBlock, *, centred: bool) -> None:
        super().__init__()
        self.local_conv = block.local_conv
        self.to_tokens = _linear(block.to_tokens)
        self.layers = nn.ModuleList(LeanLayer(cast(TransformerLayer, layer), centred=centred) for layer in block.layers)
        self.norm = Normalise(block.norm, centred=centred)
        self.from_tokens = _linear(block.from_tokens.conv)
        _absorb_affine(block.norm, self.from_tokens)
        if centred:
            _centre(self.to_tokens)
        self.fuse_input, self.fuse_features = _halves(block.fuse.conv)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        rows, columns = (height + PATCH - 1) // PATCH, (width + PATCH - 1) // PATCH
        features = resize(self.local_conv(x), rows * PATCH, columns * PATCH)
        tokens = self.to_tokens(unfold(features, rows, columns))
        for layer in self.layers:
            tokens = layer(tokens, rows * columns)
        tokens = self.from_tokens(self.norm(tokens))
        if surely_has_size(x, rows * PATCH, columns * PATCH):
            features = fold(F.silu(tokens), batch, rows, columns)  # no operation between fold and convolution
        else:
            features = F.silu(resize(fold(tokens, batch, rows, columns), height, width))
        return F.silu(self.fuse_input(x) + self.fuse_features(features))


class LeanLayer(nn.Module):
    """A `TransformerLayer` without dropout. Tokens (length · 4N, d) in and out, `length` patches an image."""

    def __init__(self, layer: TransformerLayer, *, centred: bool) -> None:
        super().__init__()
        self.attention_norm = Normalise(layer.attention_norm, centred=centred)
        self.attention = LeanAttention(layer.attention, layer.attention_norm)
        self.mlp_norm = Normalise(layer.mlp_norm, centred=centred)
        self.widen, self.narrow = (cast(nn.Linear, copy.deepcopy(layer.mlp[place])) for place in (0, 3))
        _absorb_affine(layer.mlp_norm, self.widen)
        if centred:
            _centre(self.attention.out)
            _centre(self.narrow)

    def forward(self, tokens: Tensor, length: int) -> Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens), length)
        return tokens + self.narrow(F.silu(self.widen(self.mlp_norm(tokens))))


class LeanAttention(nn.Module):
    """`Attention` on tokens (length · 4N, d) in the order of `unfold`; `norm` is the one whose output it reads."""

    def __init__(self, attention: Attention, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            copy.deepcopy(linear) for linear in (attention.query, attention.key, attention.value, attention.out)
        )
        _absorb_affine(norm, self.query, self.key, self.value)
        self.query.weight.mul_(attention.scale)
        self.query.bias.mul_(attention.scale)
        self.out.bias.add_(self.out.weight @ self.value.bias)
        self.key.bias = self.value.bias = None  # type: ignore[assignment]
        self.head_dim = self.out.in_features // NUM_HEADS

    def forward(self, tokens: Tensor, length: int) -> Tensor:
        def by_length(x: Tensor) -> Tensor:  # → (length, 4N · heads, d_head)
            return x.reshape(length, -1, self.head_dim)

        query = by_length(self.query(tokens)).permute(1, 0, 2)
        key = by_length(self.key(tokens)).permute(1, 2, 0)
        value = by_length(self.value(tokens)).permute(1, 0, 2)
        mixed = (query @ key).softmax(dim=-1) @ value  # (4N · heads, length, d_head)
        return self.out(mixed.permute(1, 0, 2).reshape(tokens.shape))


class Normalise(nn.Module):
    """LayerNorm without scale and shift; with `centred` for channels whose mean is zero, which makes it x / rms(x)."""

    def __init__(self, norm: nn.LayerNorm, *, centred: bool) -> None:
        super().__init__()
        self.eps, self.shape, self.centred = norm.eps, norm.normalized_shape, centred

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self.eps)
        return F.layer_norm(x, self.shape, eps=self.eps)


def unfold(features: Tensor, rows: int, columns: int) -> Tensor:
    """Map (N, C, 2·rows, 2·columns) → tokens (rows·columns·4·N, C), ordered (patch, image, place in the patch)."""
    batch, channels = features.shape[:2]
    # The two pixels of a patch that are neighbours in a row move together.
    x = features.permute(0, 2, 3, 1).reshape(batch * rows, PATCH, columns, PATCH * channels)
    if is_one(batch):  # then four dimensions do
        return x.permute(0, 2, 1, 3).reshape(-1, channels)
    return x.reshape(batch, rows, PATCH, columns, PATCH * channels).permute(1, 3, 0, 2, 4).reshape(-1, channels)


def fold(tokens: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """The inverse of `unfold`."""
    channels = tokens.shape[1]
    if is_one(batch):
        x = tokens.reshape(rows, columns, PATCH, PATCH * channels).permute(0, 2, 1, 3)
    else:
        x = tokens.reshape(rows, columns, batch, PATCH, PATCH * channels).permute(2, 0, 3, 1, 4)
    return x.reshape(batch, PATCH * rows, PATCH * columns, channels).permute(0, 3, 1, 2)


def _linear(conv: nn.Conv2d) -> nn.Linear:
    """A 1×1 convolution as a linear layer on its channels."""
    linear = nn.Linear(conv.in_channels, conv.out_channels, bias=conv.bias is not None, dtype=conv.weight.dtype)
    linear.weight.copy_(conv.weight[:, :, 0, 0])
    if conv.bias is not None:
        linear.bias.copy_(conv.bias)
    return linear


def _halves(conv: nn.Conv2d) -> tuple[nn.Conv2d, nn.Conv2d]:
    """conv(cat(a, b)) = first(a) + second(b), where a and b have as many channels."""
    first, second = copy.deepcopy(conv), copy.deepcopy(conv)
    first.weight, second.weight = (nn.Parameter(part.contiguous()) for part in conv.weight.chunk(2, dim=1))
    first.in_channels = second.in_channels = conv.in_channels // 2
    first.bias = None
    return first, second


def _absorb_affine(norm: nn.LayerNorm, *readers: nn.Linear) -> None:
    """readers ← readers ∘ norm's scale and shift."""
    for linear in readers:
        linear.bias.add_(linear.weight @ norm.bias)
        linear.weight.mul_(norm.weight)


def _centre(linear: nn.Linear) -> None:
    """Takes the mean over the output channels out of what `linear` writes."""
    linear.weight.sub_(linear.weight.mean(dim=0))
    if linear.bias is not None:
        linear.bias.sub_(linear.bias.mean())
