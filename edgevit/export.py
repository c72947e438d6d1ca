"""Exports a model of ours: the realistic inputs, sizes and place to write that `converters.export` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import converters
from converters.artifact import Artifact, Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import evaluation_transform, load_images, photographs
from edgevit.sources import Source

DEFAULT_OUT = Path("exports")


def export(
    source: Source,
    *,
    formats: Sequence[str],
    sizes: Sequence[Size] = (),
    precision: str | None = None,
    batch: int | str = "dynamic",
    target: str = "ios16",
    out: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Artifact]:
    """Writes verified files of `source`, into a run's `artifacts/`, into exports/, or into `out`.

    Without `sizes`: those that a run was trained with, else the one of the weights' preprocessing. Files are compared
    with the module on held-out pictures of the run's data, else on photographs. Raises as `converters.export` does.
    """
    if not sizes:
        sizes = source.run.sizes if source.run else (Size.parse(source.preprocessing.size),)
    for size in sizes:
        source.signature.check(size)
    if source.note:
        progress(f"note: {source.note}")
    return converters.export(
        source.module,
        source.signature,
        name=source.name,
        out=out or (source.run.artifacts if source.run else DEFAULT_OUT),
        formats=formats,
        sizes=sizes,
        precision=precision,
        batch=batch,
        target=target,
        sample_inputs=image_samples(source, progress),
        preprocessing=source.preprocessing,
        labels=source.labels,
        source_sha256=source.sha256,
        progress=progress,
    )


def image_samples(
    source: Source, progress: Callable[[str], None] = lambda line: None
) -> Callable[[Size, int], dict[str, np.ndarray]]:
    """(size, n) → n pictures as the model sees them in evaluation: {input name: (n, 3, H, W) float32}."""
    name, preprocessing = source.signature.inputs[0].name, source.preprocessing

    def samples(size: Size, count: int) -> dict[str, np.ndarray]:
        return {name: _stack(pictures(count), preprocessing, size)}

    def pictures(count: int) -> list[Image.Image]:
        if source.run is None:
            return _photographs(count)
        try:
            images = load_images(source.run.config["data"], "test")
        except EdgeVitError as error:  # the pictures may have stayed on the machine that trained
            progress(f"note: compared on photographs, not on held-out pictures ({error})")
            return _photographs(count)
        return [images.image(int(index)) for index in np.linspace(0, len(images) - 1, count)]

    return samples


def _stack(pictures: list[Image.Image], preprocessing: Preprocessing, size: Size) -> np.ndarray:
    transform = evaluation_transform(preprocessing, size)
    return np.stack([transform(picture).numpy() for picture in pictures])


def _photographs(count: int) -> list[Image.Image]:
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
