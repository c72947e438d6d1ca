"""Modules to export, with weights whose outputs vary: on default ones a comparison would prove nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from converters.signature import Signature, Size


class Small(nn.Module):
    """Convolutions with BatchNorm, then attention over the map: each kind of layer once. Sides in multiples of 8."""

    signature = Signature.image_classifier(7, multiple_of=8)

    def __init__(self, channels: int = 16, classes: int = 7) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
        self.depthwise_norm = nn.BatchNorm2d(channels)
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = nn.functional.silu(self.stem_norm(self.stem(image)))
        x = nn.functional.silu(self.depthwise_norm(self.depthwise(x)))
        tokens = x.flatten(2).transpose(1, 2)
        query, key, value = self.qkv(self.norm(tokens)).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2) * 16**-0.5).softmax(dim=-1)
        return self.head((tokens + weights @ value).mean(dim=1))


def pictures(size: Size, count: int) -> dict[str, np.ndarray]:
    """Smooth random pictures (count, 3, H, W), each with another contrast and colour; the same every time."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(count, 3, 6, 6, generator=generator) * torch.linspace(0.3, 1, count)[:, None, None, None]
    return {"image": nn.functional.interpolate(coarse, (size.height, size.width), mode="bicubic").numpy()}


def lively_small(**options: int) -> Small:
    torch.manual_seed(0)
    module = lively(Small(**options), torch.from_numpy(pictures(Size.parse("64"), 8)["image"]))
    assert isinstance(module, Small)
    return module


def lively(module: nn.Module, examples: Tensor) -> nn.Module:
    """`module` in eval mode, with BatchNorms that do something and outputs whose std over `examples` is 1.

    `examples` (N, 3, H, W) are also what BatchNorm's running statistics are taken from.
    """
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.7, 1.3)
            nn.init.normal_(layer.bias, std=0.1)
            layer.momentum = None  # running statistics: the plain average
    with torch.no_grad():
        module.train()(examples)
        logits = module.eval()(examples)
        head = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
        head.weight /= (logits - logits.mean(0)).std()
    return module
