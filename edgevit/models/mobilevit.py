"""MobileViT XXS, XS and S: convolutions for what is near, a transformer over unfolded patches for what is far.

Mehta and Rastegari, "MobileViT: Light-weight, General-purpose, and Mobile-friendly Vision Transformer",
arXiv 2110.02178: figure 1b and table 4 for the network, section 3.1 for the block.

Written to be exported: no tensor has more than five dimensions, no branch bakes a dynamic size in, and tokens stay
two-dimensional with their channels contiguous, which is what mobile runtimes run fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

PATCH = 2  # every variant of the paper unfolds 2 × 2 patches
NUM_HEADS = 4
MLP_RATIO = 2
TRANSFORMER_DEPTHS = (2, 4, 3)  # layers in the transformers of stages 3, 4 and 5


@dataclass(frozen=True)
class MobileViTConfig:
    """One column of the paper's table 4."""

    stage_channels: tuple[int, int, int, int, int]
    transformer_dims: tuple[int, int, int]  # widths d of the transformers in stages 3, 4 and 5
    head_channels: int  # channels that are averaged over the picture and classified
    expansion: int  # of the inverted residuals
    dropout: float = 0.1
    stem_channels: int = 16


XXS = MobileViTConfig((16, 24, 48, 64, 80), (64, 80, 96), head_channels=320, expansion=2, dropout=0.05)
XS = MobileViTConfig((32, 48, 64, 80, 96), (96, 120, 144), head_channels=384, expansion=4)
S = MobileViTConfig((32, 64, 96, 128, 160), (144, 192, 240), head_channels=640, expansion=4)


class MobileViT(nn.Module):
    """An image classifier. Images are RGB, float32, in the range that their weights' preprocessing gives.

    Heights and widths are meant to be multiples of 32; others work as they do in the reference. `dropout` acts inside
    the transformers and before the classifier; None takes the paper's (0.05 for XXS, 0.1 for the others).
    """

    def __init__(self, config: MobileViTConfig, num_classes: int = 1000, *, dropout: float | None = None) -> None:
        super().__init__()
        dropout = config.dropout if dropout is None else dropout
        c1, c2, c3, c4, c5 = config.stage_channels
        d3, d4, d5 = config.transformer_dims
        n3, n4, n5 = TRANSFORMER_DEPTHS

        def residual(channels: int, out_channels: int, stride: int = 1) -> InvertedResidual:
            return InvertedResidual(channels, out_channels, stride, config.expansion)

        self.stem = ConvNormAct(3, config.stem_channels, kernel_size=3, stride=2)
        self.stage1 = nn.Sequential(residual(config.stem_channels, c1))
        self.stage2 = nn.Sequential(residual(c1, c2, stride=2), residual(c2, c2), residual(c2, c2))
        self.stage3 = nn.Sequential(residual(c2, c3, stride=2), MobileViTBlock(c3, d3, n3, dropout))
        self.stage4 = nn.Sequential(residual(c3, c4, stride=2), MobileViTBlock(c4, d4, n4, dropout))
        self.stage5 = nn.Sequential(residual(c4, c5, stride=2), MobileViTBlock(c5, d5, n5, dropout))
        self.head_conv = ConvNormAct(c5, config.head_channels, kernel_size=1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.head_channels, num_classes)
        self.apply(_initialise)

    def forward(self, image: Tensor) -> Tensor:
        """`image` (N, 3, H, W) → logits (N, num_classes)."""
        x = self.stem(image)  # (N, C, H/2, W/2)
        x = self.stage1(x)
        x = self.stage2(x)  # H/4
        x = self.stage3(x)  # H/8
        x = self.stage4(x)  # H/16
        x = self.stage5(x)  # H/32
        x = self.head_conv(x)
        return self.classifier(self.dropout(x.mean(dim=(2, 3))))

    def export_form(self, form: str) -> nn.Module:
        """The same function as the runtime of `form` ("onnx", "tflite" or "coreml") computes it fastest."""
        from edgevit.models.mobilevit_export import export_form

        return export_form(self, form)


class ConvNormAct(nn.Module):
    """Convolution without bias, batch normalisation and, unless `act` is false, SiLU. (N, C, H, W) in and out."""

    def __init__(
        self, in_channels: int, channels: int, kernel_size: int, stride: int = 1, groups: int = 1, act: bool = True
    ) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv = nn.Conv2d(in_channels, channels, kernel_size, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class InvertedResidual(nn.Module):
    """MobileNetV2's block (arXiv 1801.04381): widen, filter each channel by itself, narrow without an activation."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = in_channels * expansion
        self.expand = ConvNormAct(in_channels, wide, kernel_size=1)
        self.depthwise = ConvNormAct(wide, wide, kernel_size=3, stride=stride, groups=wide)
        self.project = ConvNormAct(wide, channels, kernel_size=1, act=False)
        self.has_shortcut = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.has_shortcut else y


class MobileViTBlock(nn.Module):
    """Section 3.1: X → local features → tokens → transformer → folded back → joined with X. (N, C, H, W) in and out."""

    def __init__(self, channels: int, dim: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.local_conv = ConvNormAct(channels, channels, kernel_size=3)
        self.to_tokens = nn.Conv2d(channels, dim, kernel_size=1, bias=False)
        self.layers = nn.ModuleList(TransformerLayer(dim, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.from_tokens = ConvNormAct(dim, channels, kernel_size=1)
        self.fuse = ConvNormAct(2 * channels, channels, kernel_size=3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.to_tokens(self.local_conv(x))
        batch, _, height, width = features.shape
        # A patch cannot hang over the edge, so an odd map (5, 7, 9 in stage 5 at 160, 224, 288) grows by one here.
        rows, columns = (height + PATCH - 1) // PATCH, (width + PATCH - 1) // PATCH
        features = resize(features, rows * PATCH, columns * PATCH)
        tokens = unfold(features, rows, columns)
        for layer in self.layers:
            tokens = layer(tokens, sequences=PATCH * PATCH * batch)
        features = fold(self.norm(tokens), batch, rows, columns)
        features = self.from_tokens(resize(features, height, width))
        return self.fuse(torch.cat((x, features), dim=1))


def unfold(features: Tensor, rows: int, columns: int) -> Tensor:
    """Map (N, d, 2·rows, 2·columns) → tokens (4·N·rows·columns, d), ordered (place in patch, image, patch).

    Pixels at the same place of all patches of an image attend to each other: 4·N sequences of rows·columns tokens.
    """
    batch, dim = features.shape[:2]
    if is_one(batch):  # then four dimensions do, which is what accelerators take
        x = features.permute(0, 2, 3, 1).reshape(rows, PATCH, columns, PATCH * dim).permute(1, 0, 2, 3)
        return x.reshape(PATCH, rows * columns, PATCH, dim).permute(0, 2, 1, 3).reshape(-1, dim)
    x = features.permute(0, 2, 3, 1).reshape(batch * rows, PATCH, columns, PATCH, dim)
    return x.permute(1, 3, 0, 2, 4).reshape(PATCH * PATCH * batch * rows * columns, dim)


def fold(tokens: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """The inverse of `unfold`."""
    dim = tokens.shape[1]
    if is_one(batch):
        x = tokens.reshape(PATCH, PATCH, rows * columns, dim).permute(0, 2, 1, 3)
        x = x.reshape(PATCH, rows, columns, PATCH * dim).permute(1, 0, 2, 3)
    else:
        x = tokens.reshape(PATCH, PATCH, batch * rows, columns, dim).permute(2, 0, 3, 1, 4)
    return x.reshape(batch, PATCH * rows, PATCH * columns, dim).permute(0, 3, 1, 2)


def is_one(length: int) -> bool:
    """Whether a length is 1 for certain; False for a symbol that may or may not be."""
    return statically_known_true(length == 1)


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP with SiLU. Tokens (sequences · length, d) in and out."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, MLP_RATIO * dim), nn.SiLU(), nn.Dropout(dropout), nn.Linear(MLP_RATIO * dim, dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, sequences: int) -> Tensor:
        tokens = tokens + self.dropout(self.attention(self.attention_norm(tokens), sequences))
        return tokens + self.dropout(self.mlp(self.mlp_norm(tokens)))


class Attention(nn.Module):
    """softmax(Q Kᵀ / √d_head) V within each sequence. Tokens (sequences · length, d) in and out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.scale = (dim // NUM_HEADS) ** -0.5

    def forward(self, tokens: Tensor, sequences: int) -> Tensor:
        def split_heads(x: Tensor) -> Tensor:  # → (sequences, heads, length, d_head)
            return x.reshape(sequences, length, NUM_HEADS, dim // NUM_HEADS).transpose(1, 2)

        total, dim = tokens.shape
        length = total // sequences
        query = split_heads(self.query(tokens) * self.scale)
        key, value = split_heads(self.key(tokens)), split_heads(self.value(tokens))
        weights = (query @ key.transpose(-2, -1)).softmax(dim=-1)  # (sequences, heads, length, length)
        return self.out((weights @ value).transpose(1, 2).reshape(total, dim))


def resize(features: Tensor, height: int, width: int) -> Tensor:
    """Bilinear, to (N, d, height, width); no operation when that is surely the size already.

    Under torch.export a size may be a symbol, odd or even. Asking `if` would bake in the answer for the size that is
    traced, so the resize then stays in the graph: to its own size it returns every value unchanged.
    """
    if surely_has_size(features, height, width):
        return features
    return F.interpolate(features, size=(height, width), mode="bilinear", align_corners=False)


def surely_has_size(features: Tensor, height: int, width: int) -> bool:
    """Whether (N, C, height, width) is the shape for certain; False for a symbol that may or may not be equal."""
    return statically_known_true(features.shape[2] == height) and statically_known_true(features.shape[3] == width)


def _initialise(module: nn.Module) -> None:
    """The reference's: Kaiming for convolutions (fan out, by group), truncated normal for linear layers."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
