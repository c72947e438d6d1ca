"""Which files an export writes: their names, and the arguments that no file could be made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from converters.artifact import DEFAULT_PRECISION, SUFFIXES
from converters.errors import EdgeVitError
from converters.signature import Signature, Size

FORMATS = ("onnx", "tflite", "coreml")
PRECISIONS = {"onnx": ("fp32", "fp16"), "tflite": ("fp32", "fp16"), "coreml": ("fp16", "fp32")}
TARGETS = ("ios16", "ios17", "ios18")
INPUTS = ("tensor", "image")


@dataclass(frozen=True)
class Plan:
    """One file to write."""

    file: str
    format: str
    precision: str
    batch: int | str
    sizes: tuple[Size, ...]


def check_arguments(
    signature: Signature,
    formats: Sequence[str],
    sizes: Sequence[Size],
    precision: str | None,
    batch: int | str,
    target: str,
    labels: Sequence[str] = (),
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
    if labels and all(spec.meaning != "logits" for spec in signature.outputs):
        raise EdgeVitError("labels: no output of the model is a classifier's logits; leave them out")
    for spec in signature.outputs:
        if labels and spec.meaning == "logits" and spec.shape[-1] != len(labels):
            raise EdgeVitError(f"{len(labels)} labels for a model of {spec.shape[-1]} classes: one line for each class")


def plans(
    name: str,
    form: str,
    sizes: tuple[Size, ...],
    precision: str | None,
    batch: int | str,
    target: str,
    *,
    static: bool = False,
    picture: bool = False,
    default: str = "",
) -> Iterator[Plan]:
    """The files of one format: MODEL[-image][-PRECISION][-SIZE].EXT, with a size only where each has its own file.

    Each size has its own with `static`; in Core ML before iOS 18, which has no functions; and in TFLite files that
    take a `picture`, since the libraries that read their metadata know a single signature. In a file of several
    sizes the `default` one comes first: it is what a program gets that asks for none.
    """
    sizes = tuple(sorted(sizes, key=lambda size: str(size) != default))
    chosen = precision or DEFAULT_PRECISION[form]
    stem = name + ("-image" if picture else "") + ("" if chosen == DEFAULT_PRECISION[form] else f"-{chosen}")
    count = batch if form == "onnx" else 1
    if static or (form == "coreml" and target != "ios18") or (form == "tflite" and picture):
        for size in sizes:
            yield Plan(
                f"{stem}-{size}{SUFFIXES[form]}" if size.dims else stem + SUFFIXES[form], form, chosen, count, (size,)
            )
    else:
        yield Plan(stem + SUFFIXES[form], form, chosen, count, sizes)


def unlisted(signature: Signature, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Sizes that nobody asked for, at which a dynamic file is proven too: one with equal sides, one without.

    Both are small. Empty where the signature allows no such size.
    """
    if len(sizes) < 2 or not signature.dims:
        return ()
    candidates: list[list[int]] = []
    for dim in signature.dims:
        smallest = min(size[dim.name] for size in sizes)
        steps = (smallest + dim.multiple_of * step for step in range(8))
        candidates.append([n for n in steps if dim.maximum is None or n <= dim.maximum])
    names = [dim.name for dim in signature.dims]
    shortest = min(len(values) for values in candidates)
    equal = [Size(tuple(zip(names, (values[i] for values in candidates), strict=True))) for i in range(shortest)]
    found = [size for size in equal if size not in sizes][:1]
    if len(names) > 1 and shortest > 1:
        unequal = [values[min(i, 1)] for i, values in enumerate(candidates)]
        found.append(Size(tuple(zip(names, unequal, strict=True))))
    return tuple(size for size in found if size not in sizes)
