"""Exports a model of ours: the realistic inputs, sizes and place to write that `converters.export` is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import converters
from converters.artifact import Artifact
from converters.errors import EdgeVitError
from converters.plan import check_arguments
from converters.signature import Size
from edgevit.samples import sample_inputs
from edgevit.side_by_side import side_by_side
from edgevit.sources import Source

DEFAULT_OUT = Path("exports")
SLOWEST_FIRST = ("tflite", "coreml", "onnx")


def export(
    source: Source,
    *,
    formats: Sequence[str],
    sizes: Sequence[Size] = (),
    precision: str | None = None,
    batch: int | str = "dynamic",
    target: str = "ios16",
    static: bool = False,
    input: str = "tensor",
    labels: Sequence[str] | None = None,
    rewrites: Sequence[str] | None = None,
    debug_info: bool = False,
    keep_failed: bool = False,
    out: Path | None = None,
    processes: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Artifact]:
    """Writes verified files of `source`, into a run's `artifacts/`, into exports/, or into `out`.

    Without `sizes`: those that a run was trained with, else the one of the weights' preprocessing. `labels` replace
    the source's own. Files are compared with the module on held-out pictures of the run's data, else on photographs.
    With `processes` above 1, formats are written side by side in processes of their own; a calling script must then
    be importable (`if __name__ == …`). The other options are those of `converters.export`; raises as it does.
    """
    sizes = tuple(sizes) or default_sizes(source)
    labels = source.labels if labels is None else tuple(labels)
    check_arguments(source.signature, formats, sizes, precision, batch, target, labels)
    if source.note:
        progress(f"note: {source.note}")
    options = {
        "sizes": tuple(sizes),
        "precision": precision,
        "batch": batch,
        "target": target,
        "static": static,
        "input": input,
        "labels": labels,
        "rewrites": rewrites,
        "debug_info": debug_info,
        "keep_failed": keep_failed,
        "out": out or (source.run.artifacts if source.run else DEFAULT_OUT),
    }
    # The slowest is begun first: TFLite converts every size by itself.
    groups = [(form,) for form in sorted(formats, key=SLOWEST_FIRST.index)] if processes > 1 else [tuple(formats)]
    jobs = [functools.partial(_export_formats, source, group, options) for group in groups]
    artifacts = [artifact for part in side_by_side(jobs, processes, progress) for artifact in part]
    return sorted(artifacts, key=lambda artifact: list(formats).index(artifact.metadata.format))


def default_sizes(source: Source) -> tuple[Size, ...]:
    """Those that a run was trained with, else the source's own; `fixed` where the model has no choice."""
    return tuple(source.run.sizes) if source.run else (source.size,)


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names, one on each line, in the order of the logits. Raises EdgeVitError for a file that is none."""
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines())
    except UnicodeDecodeError as error:
        raise EdgeVitError(f"{path}: not UTF-8 text; give one class name on each line") from error
    except OSError as error:
        raise EdgeVitError(f"{path}: cannot be read ({error.strerror})") from error
    if not names or "" in names:
        empty = f"line {names.index('') + 1} is empty" if names else "it is empty"
        raise EdgeVitError(f"{path}: {empty}; give one class name on each line")
    return names


def _export_formats(
    source: Source, formats: tuple[str, ...], options: dict[str, Any], progress: Callable[[str], None]
) -> list[Artifact]:
    return converters.export(
        source.module,
        source.signature,
        name=source.name,
        formats=formats,
        sample_inputs=sample_inputs(source, progress),
        preprocessing=source.preprocessing,
        source_sha256=source.sha256,
        progress=progress,
        **options,
    )
