"""From a picture to a model's input: the exact one for evaluation, and seeded augmentation for training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size

AUGMENTATIONS = ("none", "light", "standard")
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def evaluation_transform(preprocessing: Preprocessing, size: Size) -> Callable[[Image.Image], Tensor]:
    """PIL RGB picture → (3, H, W) float32 at `size`, as the model was meant to see it.

    Pillow resizes (with antialiasing) so that the picture just covers floor(H / crop_fraction) × floor(W /
    crop_fraction), keeping its aspect ratio; the centre H × W is cut out; channels are put in order, and each value v
    in 0…255 becomes (v · scale − mean) / std. Equal to timm's evaluation transform. Hugging Face's processors differ
    in one thing: where an odd number of pixels is cut off, they cut half a pixel further up or left, not to the even.

    Raises EdgeVitError for preprocessing that is not understood.
    """
    return EvaluationTransform(_Finish.of(preprocessing), *_geometry(preprocessing, size))


def training_transform(
    preprocessing: Preprocessing, size: Size, augment: str, seed: int
) -> Callable[[Image.Image, int, int], Tensor]:
    """(PIL RGB picture, epoch, index) → (3, H, W) float32, augmented; a function of (seed, epoch, index) alone.

    So a picture comes out the same whatever the number of workers, and whatever was drawn before; the global
    generators stay as they were. `augment` is one of

    - `none`: as in evaluation;
    - `light`, for small centred pictures such as digits: the part seen in evaluation, shifted by up to a tenth and
      scaled by up to 15 % either way; what lies outside the picture repeats its border; never mirrored;
    - `standard`, for photographs: 50–100 % of the picture's area at an aspect ratio between 3/4 and 4/3, mirrored
      in half of the cases.

    Raises EdgeVitError for another `augment`, or for preprocessing that is not understood.
    """
    if augment not in AUGMENTATIONS:
        raise EdgeVitError(f"augmentation '{augment}': choose from {', '.join(AUGMENTATIONS)}")
    evaluation = EvaluationTransform(_Finish.of(preprocessing), *_geometry(preprocessing, size))
    standard = v2.Compose(
        [
            v2.RandomResizedCrop(
                (size.height, size.width),
                scale=(0.5, 1.0),
                interpolation=v2.InterpolationMode(preprocessing.interpolation),
            ),
            v2.RandomHorizontalFlip(),
        ]
    )
    return TrainingTransform(evaluation, standard, preprocessing.crop_fraction, augment, seed)


@dataclass(frozen=True)
class EvaluationTransform:
    """What `evaluation_transform` returns; a class, so that it can be sent to a worker process."""

    finish: _Finish
    size: tuple[int, int]  # height, width of the result
    cover: tuple[int, int]  # height, width that the resized picture covers
    resample: Image.Resampling

    def __call__(self, image: Image.Image) -> Tensor:
        width, height = image.size
        rows, columns = self.cover
        if rows == columns:  # rounded as torchvision's and timm's square case does: down
            short = min(width, height)
            width, height = int(rows * width / short), int(rows * height / short)
        else:
            ratio = min(height / rows, width / columns)
            width, height = round(width / ratio), round(height / ratio)
        image = image.resize((width, height), self.resample)
        rows, columns = self.size
        top, left = round((height - rows) / 2), round((width - columns) / 2)
        return self.finish(image.crop((left, top, left + columns, top + rows)))


@dataclass(frozen=True)
class TrainingTransform:
    """What `training_transform` returns."""

    evaluation: EvaluationTransform
    standard: v2.Compose
    crop_fraction: float
    augment: str
    seed: int

    def __call__(self, image: Image.Image, epoch: int, index: int) -> Tensor:
        if self.augment == "none":
            return self.evaluation(image)
        # torchvision draws from torch's global generator: lend it one of this example's own, and give it back.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_example_seed(self.seed, epoch, index))
            augmented = self.standard(image) if self.augment == "standard" else self._shift_and_scale(image)
        return self.evaluation.finish(augmented)

    def _shift_and_scale(self, image: Image.Image) -> Image.Image:
        """One resize of a box with fractional edges: on 8×8 pictures whole pixels would be far too coarse."""
        (rows, columns), (width, height) = self.evaluation.size, image.size
        zoom, right, down = (torch.rand(3, dtype=torch.float64) * 2 - 1).tolist()
        scale = self.crop_fraction * min(width / columns, height / rows) * (1 + 0.15 * zoom)
        box_width, box_height = scale * columns, scale * rows
        left = (width - box_width) / 2 + 0.1 * right * box_width
        top = (height - box_height) / 2 + 0.1 * down * box_height
        outside = max(-left, -top, left + box_width - width, top + box_height - height)
        margin = max(0, math.ceil(outside))
        if margin:
            image, left, top = _repeat_border(image, margin), left + margin, top + margin
        box = (left, top, left + box_width, top + box_height)
        return image.resize((columns, rows), self.evaluation.resample, box=box)


@dataclass(frozen=True)
class _Finish:
    """PIL RGB (H, W) → (3, H, W) float32, in the model's channel order and range."""

    bgr: bool
    scale: float
    mean: Tensor  # (3, 1, 1)
    std: Tensor  # (3, 1, 1)

    @classmethod
    def of(cls, preprocessing: Preprocessing) -> _Finish:
        if preprocessing.channel_order not in ("RGB", "BGR"):
            raise EdgeVitError(f"channel order '{preprocessing.channel_order}': it is RGB or BGR")
        if len(preprocessing.mean) != 3 or len(preprocessing.std) != 3 or 0 in preprocessing.std:
            raise EdgeVitError("preprocessing: mean and std are three numbers each, and no std is 0")
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        return cls(preprocessing.channel_order == "BGR", preprocessing.scale, mean, std)

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.bgr:
            pixels = pixels.flip(0)
        return (
            pixels.to(torch.float32, memory_format=torch.contiguous_format)
            .mul_(self.scale)
            .sub_(self.mean)
            .div_(self.std)
        )


def _geometry(preprocessing: Preprocessing, size: Size) -> tuple[tuple[int, int], tuple[int, int], Image.Resampling]:
    """(height, width) of the result, (height, width) that the resized picture covers, and how it is resized."""
    if preprocessing.interpolation not in RESAMPLING:
        raise EdgeVitError(f"interpolation '{preprocessing.interpolation}': choose from {', '.join(RESAMPLING)}")
    if not 0 < preprocessing.crop_fraction <= 1:
        raise EdgeVitError(f"crop fraction {preprocessing.crop_fraction}: it is above 0 and at most 1")
    target = (size.height, size.width)
    cover = (
        math.floor(size.height / preprocessing.crop_fraction),
        math.floor(size.width / preprocessing.crop_fraction),
    )
    return target, cover, RESAMPLING[preprocessing.interpolation]


def _repeat_border(image: Image.Image, margin: int) -> Image.Image:
    """Padded by `margin` pixels on each side; on tiny pictures ten times faster than torchvision's `pad`."""
    rows, columns = (np.arange(-margin, length + margin) for length in (image.height, image.width))
    pixels = np.asarray(image).take(rows, axis=0, mode="clip").take(columns, axis=1, mode="clip")
    return Image.fromarray(pixels)


def _example_seed(seed: int, epoch: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
