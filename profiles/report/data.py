"""What the report shows, read out of a store: a row for each measurement, a section for each device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from converters.errors import EdgeVitError
from converters.signature import Size
from profiles.store import AccuracyKey, Cell, Measurement, Metric, Status, Store

MAX_VALUES = 4  # of a circumstance that differs between cells; of more, the range is shown
MIN_BUSY = 1.2  # wall time over CPU time above this: the process waited for a core


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval; `low` and `high` equal `value` where no interval is known."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return self.low < self.high

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Accuracy:
    """Share of `n` held-out examples that the file got right, 0 to 1."""

    interval: Interval
    n: int

    @property
    def value(self) -> float:
        return self.interval.value


@dataclass(frozen=True)
class Row:
    """One measurement with the accuracy of the same file at the same size. Figures that nobody took are None.

    `delta_points` is the accuracy less the checkpoint's at the same size, in points (100 times the share).
    """

    key: str
    file: str
    path: str
    model: str
    format: str
    precision: str
    size: str
    threads: int
    runtime: str
    accelerator: str
    status: Status
    reason: str
    accuracy: Accuracy | None
    delta_points: float | None
    latency_ms: Interval | None
    p90_ms: float | None
    p99_ms: float | None
    min_ms: float | None
    cpu_ms: float | None
    wall_per_cpu: float | None
    load_ms: float | None
    memory_mb: float | None
    size_mb: float | None
    gflop: float | None

    @property
    def is_timed(self) -> bool:
        return self.status == "ok" and self.latency_ms is not None

    @property
    def is_ranked(self) -> bool:
        """Both figures are there, and the device computed the right thing."""
        return self.is_timed and self.accuracy is not None

    @property
    def ms_per_gflop(self) -> float | None:
        return self.latency_ms.value / self.gflop if self.latency_ms and self.gflop and self.is_timed else None

    @property
    def was_busy(self) -> bool:
        return self.is_timed and self.wall_per_cpu is not None and self.wall_per_cpu > MIN_BUSY


@dataclass(frozen=True)
class Section:
    """What may be compared: rows of one device, OS build, batch and protocol. Sections are never ranked together."""

    device_id: str
    os_build: str
    batch: int
    protocol_version: int
    device_name: str
    rows: tuple[Row, ...]
    circumstances: tuple[tuple[str, str], ...]
    data: str  # "digits test", or "" where no accuracy is stored
    checkpoint: tuple[tuple[str, Accuracy], ...]  # by size

    @property
    def is_this_machine(self) -> bool:
        """`ssh://…`, `adb://…`, `ios://…` and `browser` are devices of their own; what is left ran right here."""
        return "://" not in self.device_id and self.device_id != "browser"

    @property
    def is_cpu_only(self) -> bool:
        return all(row.accelerator == "cpu" for row in self.rows if row.is_timed)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.model for row in self.rows))


def read_sections(store: Store) -> list[Section]:
    """Every measurement of `store`, by device, the section with the most timed rows first.

    Raises EdgeVitError when the store holds no measurement.
    """
    measurements = store.measurements()
    if not measurements:
        raise EdgeVitError(f"{store.path}: no measurements in it; run `edgevit sweep {store.path.parent}` first")
    data, metrics = _pick_evaluation(measurements, store.metrics())
    groups: dict[tuple[str, str, int, int], list[Measurement]] = {}
    for item in measurements:
        cell = item.cell
        groups.setdefault((cell.device_id, cell.os_build, cell.batch, cell.protocol_version), []).append(item)
    sections = [_section(key, items, data, metrics) for key, items in groups.items()]
    return sorted(sections, key=lambda section: -sum(row.is_timed for row in section.rows))


Metrics = dict[tuple[str, str, str], Metric]  # by artifact or checkpoint SHA-256, size, accelerator


def _pick_evaluation(
    measurements: list[Measurement], stored: list[tuple[AccuracyKey, str, Metric]]
) -> tuple[str, Metrics]:
    """The held-out images that most of the measured cells were evaluated on: only figures of one set are compared."""
    cells = {(item.cell.artifact_sha256, item.cell.size) for item in measurements}
    groups: dict[tuple[str, str], Metrics] = {}
    names: dict[tuple[str, str], str] = {}
    for key, data_name, metric in stored:
        if metric.name == "accuracy" and math.isfinite(metric.value):
            evaluation = (key.data_sha256, key.split)
            groups.setdefault(evaluation, {})[key.artifact_sha256, key.size, key.accelerator] = metric
            names[evaluation] = f"{_text(data_name)} {_text(key.split)}"

    def covered(evaluation: tuple[str, str]) -> tuple[int, int]:
        metrics = groups[evaluation]
        return len(cells & {key[:2] for key in metrics}), max(metric.n for metric in metrics.values())

    if not groups:
        return "", {}
    best = max(groups, key=covered)
    return names[best], groups[best]


def _section(key: tuple[str, str, int, int], measurements: list[Measurement], data: str, metrics: Metrics) -> Section:
    rows = sorted((_row(item, metrics) for item in measurements), key=_row_order)
    sources = dict.fromkeys(str(item.artifact.get("source_sha256", "")) for item in measurements)
    sizes = dict.fromkeys(row.size for row in rows)
    checkpoint: list[tuple[str, Accuracy]] = []
    if len(sources) == 1:
        found = ((size, _checkpoint_accuracy(next(iter(sources)), size, metrics)) for size in sizes)
        checkpoint = sorted(((size, acc) for size, acc in found if acc), key=lambda item: size_order(item[0]))
    return Section(
        *(_text(key[0]), _text(key[1]), *key[2:]),
        device_name=_device_name(measurements),
        rows=tuple(rows),
        circumstances=_common(measurements),
        data=data if any(row.accuracy for row in rows) else "",
        checkpoint=tuple(checkpoint),
    )


def _row(item: Measurement, metrics: Metrics) -> Row:
    cell, artifact, summary = item.cell, item.artifact, item.summary
    median = _number(summary.get("median_ms"))
    accuracy = _accuracy(cell, item.status, metrics)
    source = _checkpoint_accuracy(str(artifact.get("source_sha256", "")), cell.size, metrics)
    size_bytes, flops = _number(artifact.get("size_bytes")), _number(artifact.get("flops"))
    name = _text(artifact.get("name") or cell.artifact_sha256[:12])
    return Row(
        key=cell.key,
        file=name,
        path=_text(artifact.get("file") or name),
        model=_text(artifact.get("model") or "model"),
        format=_text(artifact.get("format") or cell.runtime),
        precision=_text(artifact.get("precision") or ""),
        size=_text(cell.size),
        threads=cell.threads,
        runtime=_text(f"{cell.runtime} {cell.runtime_version}".strip()),
        accelerator=_text(cell.accelerator),
        status=item.status,
        reason=_text(item.reason),
        accuracy=accuracy,
        delta_points=100 * (accuracy.value - source.value) if accuracy and source else None,
        latency_ms=None
        if median is None or median <= 0
        else _interval(median, summary.get("median_low_ms"), summary.get("median_high_ms")),
        p90_ms=_number(summary.get("p90_ms")),
        p99_ms=_number(summary.get("p99_ms")),
        min_ms=_number(summary.get("min_ms")),
        cpu_ms=_number(summary.get("cpu_median_ms")),
        wall_per_cpu=_number(summary.get("wall_per_cpu")),
        load_ms=_number(summary.get("load_ms")),
        memory_mb=_number(summary.get("peak_memory_mb")),
        size_mb=size_bytes / 1e6 if size_bytes is not None else None,
        gflop=flops / 1e9 if flops else None,
    )


def _accuracy(cell: Cell, status: Status, metrics: Metrics) -> Accuracy | None:
    """A timed row takes only what its own accelerator computed; an untimed one, whatever ran the file."""
    exact = metrics.get((cell.artifact_sha256, cell.size, cell.accelerator))
    if exact or status == "ok":
        return _to_accuracy(exact)
    return _checkpoint_accuracy(cell.artifact_sha256, cell.size, metrics)


def _checkpoint_accuracy(sha256: str, size: str, metrics: Metrics) -> Accuracy | None:
    """A checkpoint has no accelerator of its own, so any will do."""
    return _to_accuracy(next((m for key, m in metrics.items() if sha256 and key[:2] == (sha256, size)), None))


def _to_accuracy(metric: Metric | None) -> Accuracy | None:
    return metric if metric is None else Accuracy(_interval(metric.value, metric.low, metric.high), metric.n)


def _interval(value: float, low: Any, high: Any) -> Interval:
    low, high = _number(low), _number(high)
    return Interval(
        value, min(value, low if low is not None else value), max(value, high if high is not None else value)
    )


def _number(value: Any) -> float | None:
    """A finite number, or None: a report never shows NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any) -> str:
    """Names come from files that strangers made: one line of printable characters that UTF-8 can hold."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def size_order(size: str) -> tuple[int, str]:
    """Sizes by their number of pixels (or tokens), not by the alphabet."""
    try:
        return math.prod(value for _, value in Size.parse(size).dims), size
    except EdgeVitError:
        return 0, size


def _row_order(row: Row) -> tuple[Any, ...]:
    return row.model, row.status == "not_run", row.format, row.precision, row.file, size_order(row.size), row.threads


def _device_name(measurements: list[Measurement]) -> str:
    """The processor's name where the circumstances tell it, or the device's id."""
    names: Counter[str] = Counter()
    for item in measurements:
        machine = item.circumstances.get("machine")
        if isinstance(machine, dict):
            machine = next((machine[name] for name in ("cpu", "cpu_model", "model", "name") if machine.get(name)), None)
        if isinstance(machine, str) and machine.strip():
            names[_text(" ".join(machine.split()))] += 1
    return names.most_common(1)[0][0] if names else _text(measurements[0].cell.device_id)


def _common(measurements: Iterable[Measurement]) -> tuple[tuple[str, str], ...]:
    """The circumstances of a section, one line a name; where cells differ, each value that occurred."""
    values: dict[str, dict[str, None]] = {}
    for item in measurements:
        for name, value in _flatten(item.circumstances):
            values.setdefault(name, {})[value] = None
    lines: list[tuple[str, str]] = []
    for name, found in values.items():
        if name == "started at":
            lines.append(("measured", _range(sorted(found))))
        elif len(found) <= MAX_VALUES:
            lines.append((name, ", ".join(found)))
        else:
            lines.append((name, _range(sorted(found, key=_as_number))))
    return tuple(lines)


def _range(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _as_number(value: str) -> tuple[float, str]:
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in tree.items():
        label = f"{prefix}{_text(name).replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{label} ")
        elif value not in (None, "", []):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield label, _text(text if len(text) <= 200 else text[:199] + "…")
