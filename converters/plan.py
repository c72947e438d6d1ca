"""Which files an export writes: their names, and the arguments that no file could be made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from converters.artifact import DEFAULT_PRECISION, SUFFIXES
from converters.errors import EdgeVitError
from converters.signature import Signature, Size

FORMATS = ("onnx", "tflite", "coreml")
PRECISIONS = {"onnx": ("fp32", "fp16"), "tflite": ("fp32",), "coreml": ("fp16", "fp32")}
TARGETS = ("ios16", "ios17", "ios18")


@dataclass(frozen=True)
class Plan:
    """One file to write."""

    file: str
    format: str
    precision: str
    batch: int | str
    sizes: tuple[Size, ...]
    options: dict[str, Any]


def check_arguments(
    signature: Signature,
    formats: Sequence[str],
    sizes: Sequence[Size],
    precision: str | None,
    batch: int | str,
    target: str,
) -> None:
    """Raises EdgeVitError for the first argument of `converters.export` that cannot be had, before any work."""
    if not formats or not sizes:
        raise EdgeVitError("export needs at least one format and one size")
    for form in formats:
        if form not in FORMATS:
            raise EdgeVitError(f"format '{form}': choose from {', '.join(FORMATS)}")
        if precision is not None and precision not in PRECISIONS[form]:
            raise EdgeVitError(f"{form}: precision '{precision}' is not offered; {' or '.join(PRECISIONS[form])} is")
    if batch not in (1, "dynamic"):
        raise EdgeVitError(f"batch {batch}: 1 or dynamic")
    if target not in TARGETS:
        raise EdgeVitError(f"target '{target}': choose from {', '.join(TARGETS)}")
    for size in sizes:
        signature.check(size)


def plans(
    name: str, form: str, sizes: tuple[Size, ...], precision: str | None, batch: int | str, target: str
) -> Iterator[Plan]:
    """The files of one format: MODEL[-PRECISION][-SIZE].EXT, with a size only where a file cannot hold them all."""
    chosen = precision or DEFAULT_PRECISION[form]
    stem = name if chosen == DEFAULT_PRECISION[form] else f"{name}-{chosen}"
    if form != "coreml":
        yield Plan(f"{stem}{SUFFIXES[form]}", form, chosen, batch if form == "onnx" else 1, sizes, {})
        return
    options = {"target": target}
    if target == "ios18":
        yield Plan(f"{stem}.mlpackage", form, chosen, 1, sizes, options)
        return
    for size in sizes:
        yield Plan(f"{stem}-{size}.mlpackage", form, chosen, 1, (size,), options)
