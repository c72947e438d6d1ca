"""Accuracy with its interval: of a module, or of an artifact in its own runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from converters.artifact import FORMATS, Artifact, Preprocessing, artifact_sha256
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import ImageSet, evaluation_transform, load_images
from edgevit.run_folder import RunFolder
from edgevit.training.tasks import classification
from profiles.store import AccuracyKey, Metric, Store

BATCH_SIZE = 64
SUBSET_SEED = 20110  # which pictures a limit takes; fixed for ever, so that figures stay comparable
Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Evaluated:
    """One row of `evaluate`: what was measured on which data, and what came out."""

    key: AccuracyKey
    data_name: str
    metric: Metric


def evaluate(
    source: Path | str,
    *,
    data: str | None = None,
    sizes: Sequence[Size] | None = None,
    limit: int | None = None,
    threads: int = 1,
) -> list[Evaluated]:
    """Top-1 accuracy on the held-out images of `data`, by size, of a run folder's weights or of an exported file.

    `data` and `sizes` default to the run's, also for a file in a run's artifacts/; sizes of a file to all it offers.
    What belongs to a run is kept in its runs.db. `threads` are those of an exported file's runtime.
    Raises EdgeVitError for a source that is neither, or when `data` is neither given nor known.
    """
    path = Path(source)
    subject = _artifact(path, limit, threads) if path.suffix in FORMATS else _checkpoint(path, limit)
    run = subject.run
    if data is None and run is None:
        raise EdgeVitError(f"{path}: not in a run's artifacts/, so say which images with --data")
    images = load_images(data or run.config["data"], "test")  # type: ignore[union-attr]
    rows = []
    for size in sizes or subject.sizes:
        key = accuracy_key(subject.sha256, size, images, subject.preprocessing, limit)
        rows.append(Evaluated(key, images.name, subject.measure(images, size)))
        if run:
            Store(run.db_path).add_metric(key, images.name, rows[-1].metric)
    return rows


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
    from converters.picture import to_pictures
    from converters.run import load

    path = artifact.path if isinstance(artifact, Artifact) else Path(artifact)
    session = load(path, size=size, threads=threads)
    metadata = session.metadata
    if metadata is None:
        raise EdgeVitError(f"{path}: carries no edgevit metadata; write it with `edgevit export`")
    preprocessing = _preprocessing_of(path, metadata.preprocessing)
    _check_classes(path, metadata.labels, images)
    image, logits_name = metadata.signature.inputs[0], metadata.signature.outputs[0].name
    takes_pictures = image.dtype == "uint8"
    fixed = None if session.batch == "dynamic" else int(session.batch)

    def predict(batch: np.ndarray) -> np.ndarray:
        count = len(batch)
        if fixed is not None and count < fixed:  # a fixed batch takes no fewer: repeat the last picture
            batch = np.concatenate([batch, np.repeat(batch[-1:], fixed - count, axis=0)])
        inputs = {image.name: batch}
        return session.run(to_pictures(inputs, preprocessing) if takes_pictures else inputs)[logits_name][:count]

    return _accuracy(predict, images, size, preprocessing, limit, fixed or BATCH_SIZE)


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
    # At the ends the formula gives 0 and 1, which rounding must not push inside, past the proportion itself.
    return (0.0 if correct == 0 else centre - half), (1.0 if correct == n else centre + half)


@dataclass(frozen=True)
class _Subject:
    """What `evaluate` was pointed at: how it is measured at a size, and the run that it belongs to."""

    measure: Callable[[ImageSet, Size], Metric]
    sha256: str
    preprocessing: Preprocessing
    sizes: Sequence[Size]
    run: RunFolder | None


def _checkpoint(path: Path, limit: int | None) -> _Subject:
    from edgevit.sources import load_source

    source = load_source(path)
    if source.run is None:
        raise EdgeVitError(f"{path}: a model without weights; give a run folder or an exported file")

    def measure(images: ImageSet, size: Size) -> Metric:
        source.signature.check(size)
        _check_classes(path, source.labels, images)
        return evaluate_module(source.module, images, size, source.preprocessing, limit)

    return _Subject(measure, source.sha256, source.preprocessing, source.run.sizes, source.run)


def _artifact(path: Path, limit: int | None, threads: int) -> _Subject:
    from converters.run import open_artifact

    artifact = open_artifact(path)
    folder = path.absolute().parent
    belongs = folder.name == "artifacts" and RunFolder.stands_at(folder.parent)

    def measure(images: ImageSet, size: Size) -> Metric:
        return evaluate_artifact(artifact, images, size, limit, threads)

    return _Subject(
        measure,
        artifact_sha256(path),
        _preprocessing_of(path, artifact.metadata.preprocessing),
        artifact.sizes,
        RunFolder.open(folder.parent) if belongs else None,
    )


def _preprocessing_of(path: Path, preprocessing: Preprocessing | None) -> Preprocessing:
    if preprocessing is None:
        raise EdgeVitError(f"{path}: says nothing of its preprocessing; export it from a run or from known weights")
    return preprocessing


def _check_classes(path: Path, labels: Sequence[str], images: ImageSet) -> None:
    if labels and tuple(labels) != tuple(images.classes):
        raise EdgeVitError(
            f"{path}: its classes are {_some(labels)}; those of {images.name} are {_some(images.classes)}"
        )


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
