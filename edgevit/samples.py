"""Realistic inputs for a source: what exported files are compared on, measured with and calibrated by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size, TensorSpec
from edgevit.data.images import load_images
from edgevit.data.pictures import picture_set, stack
from edgevit.sources.source import Source

Arrays = dict[str, np.ndarray]
NOISE = 0.3  # of an example's standard deviation


def sample_inputs(source: Source, progress: Callable[[str], None] = lambda line: None) -> Callable[[Size, int], Arrays]:
    """(size, n) → n examples that differ: {input name: (n, …)}; the same ones every time.

    Images are held-out pictures of the run's data, else photographs, as the preprocessing makes them. Tokens are drawn
    from those of the source's examples, masks cover a beginning at least half as long as the example's, other
    floating-point inputs are the examples with noise, and other integers the examples themselves. Where the signature
    has no batch dimension, examples are stacked: (n, *shape).
    """

    def samples(size: Size, count: int) -> Arrays:
        generator = np.random.default_rng(0)
        return {spec.name: make(spec, size, count, generator) for spec in source.signature.inputs}

    def make(spec: TensorSpec, size: Size, count: int, generator: np.random.Generator) -> np.ndarray:
        shape = spec.resolve(size)[1:] if source.signature.batched else spec.resolve(size)
        if spec.meaning == "image":
            height, width = shape[-2:]
            stacked = stack(pictures(count), source.preprocessing or Preprocessing(), Size.image(height, width))
            return stacked.reshape(count, *shape)
        if source.examples is None or spec.name not in source.examples:
            raise EdgeVitError(f"{source.name}: there is no example of its input '{spec.name}'")
        example = source.examples[spec.name]
        return _varied(example if source.signature.batched else example[None], spec, shape, count, generator)

    def pictures(count: int) -> list[Image.Image]:
        if source.run is None:
            return picture_set(count)
        try:
            images = load_images(source.run.config["data"], "test")
        except EdgeVitError as error:  # the pictures may have stayed on the machine that trained
            progress(f"note: compared on photographs, not on held-out pictures ({error})")
            return picture_set(count)
        return [images.image(int(index)) for index in np.linspace(0, len(images) - 1, count)]

    return samples


def _varied(
    example: np.ndarray, spec: TensorSpec, shape: tuple[int, ...], count: int, generator: np.random.Generator
) -> np.ndarray:
    """`count` of one kind: (count, *shape), like `example` (N, …), whose lengths may be others."""
    rows = np.stack([_fitted(example[number % len(example)], shape) for number in range(count)])
    if spec.meaning == "tokens":
        return generator.integers(example.min(), example.max(), rows.shape, endpoint=True).astype(example.dtype)
    if spec.meaning == "mask" and rows.dtype.kind != "f" and rows.ndim > 1:
        for number in range(1, count):
            length = int(generator.integers((rows.shape[-1] + 1) // 2, rows.shape[-1], endpoint=True))
            rows[number, ..., length:] = 0
        return rows
    if rows.dtype.kind == "f" and spec.meaning != "mask":
        noise = generator.normal(0, NOISE * max(float(example.std()), 1e-3), rows.shape)
        return (rows + noise).astype(example.dtype)
    return rows


def _fitted(row: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`row` repeated and cut to `shape`."""
    for axis, length in enumerate(shape):
        row = row.take(np.arange(length) % row.shape[axis], axis=axis)
    return row.copy()
