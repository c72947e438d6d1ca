"""Accuracy with its interval: of a module, or of an artifact in its own runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from converters.artifact import Artifact, Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import ImageSet, evaluation_transform
from edgevit.training.tasks import classification
from profiles.store import AccuracyKey, Metric

BATCH_SIZE = 64
SUBSET_SEED = 20110  # which pictures a limit takes; fixed for ever, so that figures stay comparable
Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def evaluate_module(
    module: nn.Module,
    images: ImageSet,
    size: Size,
    preprocessing: Preprocessing,
    limit: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Metric:
    """Top-1 accuracy of a classifier, (N, 3, H, W) → logits (N, C), in evaluation mode, on all images or `limit`.

    `module` is expected on `device` and is left in the mode that it was in.
    """

    def predict(batch: np.ndarray) -> np.ndarray:
        logits = module(torch.from_numpy(batch).to(device).contiguous(memory_format=torch.channels_last))
        return logits.float().cpu().numpy()

    was_training = module.training
    module.eval()
    try:
        with torch.inference_mode():
            return _accuracy(predict, images, size, preprocessing, limit, BATCH_SIZE)
    finally:
        module.train(was_training)


def evaluate_artifact(
    artifact: Artifact | Path | str, images: ImageSet, size: Size, limit: int | None = None, threads: int = 1
) -> Metric:
    """Top-1 accuracy of an exported classifier, run in its own runtime with the preprocessing that it carries.

    Raises EdgeVitError when the artifact has no preprocessing, does not offer `size`, or names other classes.
    """
    from converters import run

    path = artifact.path if isinstance(artifact, Artifact) else Path(artifact)
    session = run.load(path, size=size, threads=threads)
    metadata = session.metadata
    if metadata.preprocessing is None:
        raise EdgeVitError(f"{path}: says nothing of its preprocessing; export it from a run or from known weights")
    if metadata.labels and tuple(metadata.labels) != tuple(images.classes):
        raise EdgeVitError(
            f"{path}: its classes are {_some(metadata.labels)}; those of {images.name} are {_some(images.classes)}"
        )
    image_name, logits_name = metadata.signature.inputs[0].name, metadata.signature.outputs[0].name
    fixed = None if session.batch == "dynamic" else int(session.batch)

    def predict(batch: np.ndarray) -> np.ndarray:
        count = len(batch)
        if fixed is not None and count < fixed:  # a fixed batch takes no fewer: repeat the last picture
            batch = np.concatenate([batch, np.repeat(batch[-1:], fixed - count, axis=0)])
        return session.run({image_name: batch})[logits_name][:count]

    return _accuracy(predict, images, size, metadata.preprocessing, limit, fixed or BATCH_SIZE)


def accuracy_key(
    sha256: str, size: Size, images: ImageSet, preprocessing: Preprocessing, limit: int | None = None
) -> AccuracyKey:
    """Under which key runs.db holds an accuracy; `sha256` is the artifact's, or the weights' of a checkpoint."""
    split = images.split if limit is None or limit >= len(images) else f"{images.split}[:{limit}]"
    return AccuracyKey(sha256, str(size), "cpu", images.sha256, split, preprocessing.crop_fraction)


def subset(count: int, limit: int | None = None) -> Sequence[int]:
    """Indices of the images that are evaluated: all, or `limit` drawn with a fixed seed; a smaller limit's are among
    a larger one's. Raises EdgeVitError for a limit below 1."""
    if limit is not None and limit < 1:
        raise EdgeVitError(f"--limit {limit}: must be at least 1")
    if limit is None or limit >= count:
        return range(count)
    return np.sort(np.random.default_rng(SUBSET_SEED).permutation(count)[:limit]).tolist()


def wilson(correct: int, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); unlike the normal one it stays sound near 0 and 1."""
    if n < 1:
        raise EdgeVitError("no images to evaluate")
    p, z2 = correct / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _accuracy(
    predict: Callable[[np.ndarray], np.ndarray],
    images: ImageSet,
    size: Size,
    preprocessing: Preprocessing,
    limit: int | None,
    batch_size: int,
) -> Metric:
    correct = n = 0
    for batch, labels in _batches(images, size, preprocessing, limit, batch_size):
        logits = torch.from_numpy(np.asarray(predict(batch)))
        if logits.ndim != 2 or logits.shape[1] != len(images.classes):
            raise EdgeVitError(
                f"logits of shape {tuple(logits.shape)} for {images.name}, which has {len(images.classes)} classes"
            )
        correct += int(classification.correct(logits, torch.from_numpy(labels)).sum())
        n += len(labels)
    low, high = wilson(correct, n)
    return Metric("accuracy", correct / n, low, high, n)


def _batches(
    images: ImageSet, size: Size, preprocessing: Preprocessing, limit: int | None, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pictures (N, 3, H, W) float32 and labels (N,) int64."""
    transform = evaluation_transform(preprocessing, size)
    indices = subset(len(images), limit)
    for start in range(0, len(indices), batch_size):
        chunk = indices[start : start + batch_size]
        pictures = torch.stack([transform(images.image(i)) for i in chunk])
        yield pictures.numpy(), np.array([images.label(i) for i in chunk], dtype=np.int64)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" … ({len(names)})" if len(names) > 3 else "")
