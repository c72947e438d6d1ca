"""What each format can do here, asked of the same functions that `export` asks, so that the two cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass

from converters.artifact import DEFAULT_PRECISION, RUNTIMES, SUFFIXES
from converters.plan import FORMATS, INPUTS, PRECISIONS, TARGETS, plans
from converters.signature import Size

RUNS_WITH = {
    "onnxruntime": "ONNX Runtime",
    "litert": "LiteRT",
    "coreml": "the evaluator (not timed here: needs an Apple device)",
}
# What takes the time; `edgevit export` prints the seconds of every file.
TIMES = {"onnx": "once for all sizes", "tflite": "again for each size", "coreml": "again for each size"}


@dataclass(frozen=True)
class Capability:
    """One format, at one deployment target where it has several kinds of file."""

    format: str
    targets: tuple[str, ...]  # () where the format knows none
    suffix: str
    precisions: tuple[str, ...]  # the default first
    sizes: str
    batch: str
    inputs: tuple[str, ...]
    runs_with: str
    converts: str


def capabilities() -> tuple[Capability, ...]:
    """Every format that `converters.export` writes."""
    found = []
    for form in FORMATS:
        for targets in _target_groups(form):
            default = DEFAULT_PRECISION[form]
            found.append(
                Capability(
                    format=form,
                    targets=targets,
                    suffix=SUFFIXES[form],
                    precisions=(default, *(item for item in PRECISIONS[form] if item != default)),
                    sizes=_sizes(form, targets),
                    batch=_batch(form, targets),
                    inputs=INPUTS,
                    runs_with=RUNS_WITH[RUNTIMES[form]],
                    converts=TIMES[form],
                )
            )
    return tuple(found)


def _target_groups(form: str) -> list[tuple[str, ...]]:
    """Targets whose files hold sizes in the same way, together; one group of none where targets do not matter."""
    if form != "coreml":
        return [()]
    groups: dict[str, tuple[str, ...]] = {}
    for target in TARGETS:
        kind = _sizes(form, (target,))
        groups[kind] = (*groups.get(kind, ()), target)
    return list(groups.values())


def _sizes(form: str, targets: tuple[str, ...]) -> str:
    def files(picture: bool) -> int:
        two = (Size.image(64, 64), Size.image(96, 96))
        return len(list(plans("model", form, two, None, 1, targets[0] if targets else TARGETS[0], picture=picture)))

    tensors, pictures = files(False), files(True)
    if tensors > 1:
        return "one file per size"
    together = {"onnx": "all in one dynamic file", "tflite": "one signature each"}.get(form, "one function each")
    return together if pictures == 1 else f"{together}; with --input image one file per size"


def _batch(form: str, targets: tuple[str, ...]) -> str:
    target = targets[0] if targets else TARGETS[0]
    plan = next(plans("model", form, (Size.image(64, 64),), None, "dynamic", target))
    return "any, or 1" if plan.batch == "dynamic" else str(plan.batch)
