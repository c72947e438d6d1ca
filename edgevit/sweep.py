"""A run's sweep: exports what is missing, then latency and accuracy of every file at every size, into runs.db."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from converters.artifact import FORMATS, SUFFIXES, Metadata, artifact_sha256
from converters.errors import EdgeVitError
from converters.run import open_artifact
from converters.signature import Size
from edgevit.data.images import ImageSet, load_images
from edgevit.evaluation import accuracy_key, evaluate_artifact, evaluate_module
from edgevit.export import export
from edgevit.run_folder import RunFolder
from edgevit.sources import Source, load_source
from profiles import sweep as grid
from profiles.store import Metric, Store

Report = Callable[[grid.Progress], None]


@dataclass(frozen=True)
class SweepOutcome:
    """`result` of the grid; `checkpoint`: the run's own accuracy by size; `db`: where it all is."""

    result: grid.SweepResult
    checkpoint: dict[str, Metric]
    db: Path


def sweep(
    target: Path,
    *,
    formats: tuple[str, ...] = tuple(SUFFIXES),
    sizes: tuple[Size, ...] = (),
    threads: tuple[int, ...] = (1,),
    processes: int = 3,
    time_limit_s: float = 120,
    data: str | None = None,
    limit: int | None = 2000,
    db: Path | None = None,
    progress: Report = lambda step: None,
) -> SweepOutcome:
    """Measures `target`: a run folder, a folder of artifacts, or one artifact.

    Of a run, files that are missing or were made of other weights are exported as `edgevit export` does, the sizes are
    those it was trained with, the pictures its held-out ones (`limit` of them at most), and the checkpoint's own
    accuracy is stored too, under the hash of its weights. Elsewhere sizes are those that the files hold, and accuracy
    needs `data`. What `db` (runs.db in the run or beside the files) holds already is not measured again.

    Raises EdgeVitError for a target, size or data that cannot be meant; what fails on the way is in the result.
    """
    run = RunFolder.open(target) if RunFolder.stands_at(target) else None
    source = load_source(target) if run else None
    folder = run.artifacts if run else target
    sizes = sizes or (run.sizes if run else _sizes(folder, formats))
    data = data or (run.config["data"] if run else None)
    images = load_images(data, "test") if data else None
    if images is None:
        progress(grid.Progress(0, 0, "latency only: accuracy needs --data"))
    store = Store(db or (run.db_path if run else (target if target.is_dir() else target.parent) / "runs.db"))

    library = _prepare(source, folder, formats, sizes, progress) if source else _Library(_scan(folder, formats))
    plan = grid.Plan(tuple(library.files), sizes, threads, processes, time_limit_s)
    checkpoint = _checkpoint_accuracy(source, images, sizes, limit, store, progress) if source and images else {}
    with _Evaluator(data, images, limit) as evaluator:
        result = grid.sweep(
            plan,
            store,
            make_artifact=library.find,
            evaluate=evaluator.evaluate if images else None,
            progress=progress,
        )
    return SweepOutcome(result, checkpoint, store.path)


@dataclass
class _Library:
    """Files by name and size. Core ML's packages of one size each go under one name, without the size."""

    files: dict[str, dict[Size | None, Path]]  # None: a file that does not say its sizes
    failed: dict[str, EdgeVitError] = field(default_factory=dict)  # name → why it could not be exported

    def find(self, name: str, size: Size) -> Path | None:
        """None: this file does not hold the size."""
        found = self.files[name].get(size) or self.files[name].get(None)
        if found is None and name in self.failed:
            raise self.failed[name]
        return found


def _scan(target: Path, formats: tuple[str, ...], source: Source | None = None) -> dict[str, dict[Size | None, Path]]:
    """Artifacts in a folder, or the one file; with `source`, only what was made of its weights."""
    if not target.exists():
        raise EdgeVitError(f"{target}: no such run folder, folder of artifacts, or artifact")
    paths = sorted(target.iterdir()) if target.is_dir() and target.suffix not in FORMATS else [target]
    files: dict[str, dict[Size | None, Path]] = {}
    for path in paths:
        if FORMATS.get(path.suffix) not in formats or path.name.startswith("."):
            continue
        metadata = _metadata(path)
        if source and (metadata is None or metadata.source_sha256 != source.sha256):
            continue
        sizes: list[Size | None] = [Size.parse(size) for size in metadata.sizes] if metadata else [None]
        name = path.name
        if metadata and metadata.format == "coreml" and len(sizes) == 1:
            name = path.stem.removesuffix(f"-{sizes[0]}") + path.suffix
        files.setdefault(name, {}).update(dict.fromkeys(sizes, path))
    if not files and source is None:
        raise EdgeVitError(f"{target}: holds no run and no {', '.join(SUFFIXES[fmt] for fmt in formats)} file")
    return files


def _metadata(path: Path) -> Metadata | None:
    try:
        return open_artifact(path).metadata
    except EdgeVitError:
        return None


def _sizes(target: Path, formats: tuple[str, ...]) -> tuple[Size, ...]:
    sizes = {size for held in _scan(target, formats).values() for size in held if size is not None}
    if not sizes:
        raise EdgeVitError(f"{target}: no file says which sizes it holds; give --sizes, or use `edgevit profile`")
    return tuple(sorted(sizes))


def _prepare(
    source: Source, folder: Path, formats: tuple[str, ...], sizes: tuple[Size, ...], progress: Report
) -> _Library:
    """The run's artifacts, after exporting what is missing of each format."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        source.signature.check(size)
    found, failed = _scan(folder, formats, source), {}
    for fmt in formats:
        name = source.name + SUFFIXES[fmt]
        held = found.get(name, {})
        missing = tuple(size for size in sizes if size not in held)
        if not missing:
            continue
        # One file holds all sizes, so writing it anew must not lose those that it had; Core ML has a file for each.
        wanted = missing if fmt == "coreml" else (*(size for size in held if size and size not in sizes), *sizes)
        try:
            export(
                source,
                formats=(fmt,),
                sizes=wanted,
                out=folder,
                progress=lambda line: progress(grid.Progress(0, 0, line)),
            )
        except EdgeVitError as error:
            failed[name] = error
    files: dict[str, dict[Size | None, Path]] = {source.name + SUFFIXES[fmt]: {} for fmt in formats}
    return _Library(files | _scan(folder, formats, source), failed)


def _checkpoint_accuracy(
    source: Source, images: ImageSet, sizes: tuple[Size, ...], limit: int | None, store: Store, progress: Report
) -> dict[str, Metric]:
    """The module's accuracy by size, found in the store or measured."""
    assert source.preprocessing is not None  # a run's source has one
    found = {}
    for size in sizes:
        key = accuracy_key(source.sha256, size, images, source.preprocessing, limit)
        metric = store.metric(key)
        if metric is None:
            progress(grid.Progress(0, 0, f"checkpoint {size} accuracy: measuring"))
            metric = evaluate_module(source.module, images, size, source.preprocessing, limit)
            store.add_metric(key, images.name, metric)
        found[str(size)] = metric
    return found


class _Evaluator:
    """Accuracy of artifacts in a process of its own, so that a runtime that crashes takes only itself along."""

    def __init__(self, data: str | None, images: ImageSet | None, limit: int | None) -> None:
        self.data, self.images, self.limit = data, images, limit
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def evaluate(self, path: Path, size: Size) -> grid.Evaluation:
        assert self.images is not None
        metadata = open_artifact(path).metadata
        if metadata.preprocessing is None:
            raise EdgeVitError(f"{path}: says nothing of its preprocessing, so no accuracy; export it from a run")
        key = accuracy_key(artifact_sha256(path), size, self.images, metadata.preprocessing, self.limit)
        return grid.Evaluation(key, self.images.name, functools.partial(self._measure, path, size))

    def _measure(self, path: Path, size: Size) -> Metric:
        if self.pool is None:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_parent)
        try:
            return self.pool.submit(_evaluate, str(path), size, str(self.data), self.limit).result()
        except BrokenProcessPool:
            self.pool = None
            raise EdgeVitError(f"{path}: its runtime crashed at size {size}") from None


def _evaluate(path: str, size: Size, data: str, limit: int | None) -> Metric:
    """In the evaluator's process."""
    return evaluate_artifact(path, _images(data), size, limit)


@functools.cache
def _images(data: str) -> ImageSet:
    return load_images(data, "test")


def _end_with_parent() -> None:
    """A sweep that is killed must not leave this process behind: it would disturb the next one's timing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
