"""A model that takes pictures as an app holds them: uint8 RGB in, class probabilities out, preprocessing inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature, TensorSpec
from converters.wrap import named_outputs


def picture_signature(signature: Signature) -> Signature:
    """`signature` for pictures: its image becomes uint8 (batch, height, width, 3), its logits become probabilities.

    Raises EdgeVitError unless the only input is an RGB image (batch, 3, height, width).
    """
    images = [spec for spec in signature.inputs if spec.meaning == "image"]
    if len(signature.inputs) != 1 or not images or len(images[0].shape) != 4 or images[0].shape[1] != 3:
        raise EdgeVitError("input image: this model's input is not one RGB picture; leave --input image out")
    batch, _, height, width = images[0].shape
    return replace(
        signature,
        inputs=(TensorSpec(images[0].name, (batch, height, width, 3), "uint8", "image"),),
        outputs=tuple(
            replace(spec, name="probabilities", meaning="probabilities") if spec.meaning == "logits" else spec
            for spec in signature.outputs
        ),
    )


class PictureInput(nn.Module):
    """`module`, which takes (N, 3, H, W) float32 made by `preprocessing`, behind pictures of the right size.

    What is left to the app is resizing and cropping; channel order, scale, mean and std are inside.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, module: nn.Module, preprocessing: Preprocessing, signature: Signature) -> None:
        super().__init__()
        self.module = module
        self.preprocessing = preprocessing
        self.signature = picture_signature(signature)
        self.names = tuple(spec.name for spec in signature.outputs)
        self.softmaxed = tuple(spec.meaning == "logits" for spec in signature.outputs)
        factor, offset = channel_factors(preprocessing)
        self.register_buffer("factor", torch.tensor(factor), persistent=False)
        self.register_buffer("offset", torch.tensor(offset), persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """`image` (N, H, W, 3) uint8, RGB → the module's outputs in the order of `signature`, logits softmaxed."""
        x = (
            (image.float() * self.factor + self.offset).permute(0, 3, 1, 2).contiguous()
        )  # else what follows is exported by its strides
        if self.preprocessing.channel_order == "BGR":
            red, green, blue = x.split(1, dim=1)
            x = torch.cat((blue, green, red), dim=1)
        return self.finished(self.module(x))

    def finished(self, result: object) -> tuple[Tensor, ...]:
        """What `module` returned, as this signature's outputs."""
        outputs = named_outputs(result, self.names).values()
        return tuple(
            y.float().softmax(dim=-1) if softmaxed else y for y, softmaxed in zip(outputs, self.softmaxed, strict=True)
        )


def channel_factors(preprocessing: Preprocessing) -> tuple[list[float], list[float]]:
    """(factor, offset) of the channels in RGB order: the model's value is v × factor + offset for v in 0…255."""
    factor = [preprocessing.scale / std for std in preprocessing.std]
    offset = [-mean / std for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True)]
    return (factor[::-1], offset[::-1]) if preprocessing.channel_order == "BGR" else (factor, offset)


def to_pictures(inputs: Mapping[str, np.ndarray], preprocessing: Preprocessing) -> dict[str, np.ndarray]:
    """The pictures (N, H, W, 3) uint8, RGB, that `preprocessing` turns into these inputs (N, 3, H, W), rounded."""
    factor, offset = (np.array(values, np.float32) for values in channel_factors(preprocessing))
    step = -1 if preprocessing.channel_order == "BGR" else 1
    return {
        name: np.clip(np.rint((x[:, ::step].transpose(0, 2, 3, 1) - offset) / factor), 0, 255).astype(np.uint8)
        for name, x in inputs.items()
    }


def from_pictures(pictures: Mapping[str, np.ndarray], preprocessing: Preprocessing) -> dict[str, np.ndarray]:
    """The inverse of `to_pictures`: float32 (N, 3, H, W) in the preprocessing's channel order."""
    factor, offset = (np.array(values, np.float32) for values in channel_factors(preprocessing))
    step = -1 if preprocessing.channel_order == "BGR" else 1
    return {
        name: np.ascontiguousarray((x.astype(np.float32) * factor + offset).transpose(0, 3, 1, 2)[:, ::step])
        for name, x in pictures.items()
    }
