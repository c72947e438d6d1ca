"""Photographs as a model sees them, however many are asked for."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from converters.artifact import Preprocessing
from converters.signature import Size
from edgevit.data.images import photographs
from edgevit.data.transforms import evaluation_transform


def picture_set(count: int) -> list[Image.Image]:
    """The two photographs, then parts of them, mirrored and not: a different picture each."""
    whole = photographs()
    pictures = list(whole)
    for number in range(count - len(whole)):
        picture = whole[number % len(whole)]
        width, height = picture.size
        left = (number * width) // (2 * count)
        part = picture.crop((left, height // 4, left + width // 2, height))
        pictures.append(ImageOps.mirror(part) if number % 2 else part)
    return pictures[:count]


def stack(pictures: list[Image.Image], preprocessing: Preprocessing, size: Size) -> np.ndarray:
    """(N, 3, H, W) float32, as in evaluation."""
    transform = evaluation_transform(preprocessing, size)
    return np.stack([transform(picture).numpy() for picture in pictures])
