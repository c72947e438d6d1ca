"""Figures as a person reads them, and the table's columns; the HTML page and its Markdown twin share both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from profiles.report.data import Accuracy, Interval, Row

NOTHING = "–"
FORMATS = {"onnx": "ONNX", "tflite": "TFLite", "coreml": "Core ML"}
THIS_MACHINE = "measured on this machine's CPU, not a phone"
THIS_MACHINE_ACCELERATED = "measured on this machine, not a phone"
NEVER_TOGETHER = "Devices are never ranked together: a figure belongs to the device that it was measured on."
STATUS = {
    "ok": "ok",
    "failed": "failed",
    "not_run": "not timed",
    "wrong_on_device": "wrong on device",
}


@dataclass(frozen=True)
class Column:
    """One column of the table. Figures are aligned right; a timing that is absent gives way to the reason."""

    title: str
    value: Callable[[Row], str]
    is_figure: bool = True
    is_timing: bool = False
    names_row: bool = False  # repeated under the file's name where the screen is narrow


def number(value: float | None) -> str:
    """Three significant digits: 0.0123, 1.23, 12.3, 123, 12,345."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    for limit, digits in ((9.995, 1), (0.9995, 2), (0.09995, 3)):
        if size >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.2g}"


def milliseconds(latency: Interval) -> str:
    """`1.92 ms (1.83–2.10)`"""
    return f"{number(latency.value)} ms{_bracket(latency, number)}"


def milliseconds_of(row: Row) -> str:
    """The median alone: `1.92 ms`."""
    return f"{number(row.latency_ms.value if row.latency_ms else None)} ms"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def accuracy(item: Accuracy) -> str:
    """`98.1 % (95 % CI 96.1–99.1, n=360)`"""
    ends = f"95 % CI {percent(item.interval.low)}–{percent(item.interval.high)}, " if item.interval.is_known else ""
    return f"{percent(item.value)} % ({ends}n={item.n:,})"


def points(value: float | None) -> str:
    """A difference in points with its sign: `+0.4`, `−1.2`, `0.0`."""
    if value is None:
        return NOTHING
    rounded = round(value, 1) + 0.0  # no negative zero
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0"


def times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def threads(count: int) -> str:
    return counted(count, "thread")


def format_name(name: str) -> str:
    return FORMATS.get(name, name)


def reason(row: Row) -> str:
    """Why a row has no figures, or why they do not count; empty for one that has them."""
    return row.reason or ("" if row.is_timed else "no reason recorded")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _bracket(item: Interval, show: Callable[[float], str]) -> str:
    return f" ({show(item.low)}–{show(item.high)})" if item.is_known else ""


def _accuracy_cell(row: Row) -> str:
    item = row.accuracy
    return f"{percent(item.value)}{_bracket(item.interval, percent)}" if item else NOTHING


def _latency_cell(row: Row) -> str:
    return f"{number(row.latency_ms.value)}{_bracket(row.latency_ms, number)}" if row.latency_ms else NOTHING


COLUMNS = (
    Column("File", lambda row: row.file, is_figure=False),
    Column("Format", lambda row: format_name(row.format), is_figure=False, names_row=True),
    Column("Precision", lambda row: row.precision or NOTHING, is_figure=False, names_row=True),
    Column("Size", lambda row: row.size, names_row=True),
    Column("Threads", lambda row: str(row.threads) if row.status != "not_run" else NOTHING, names_row=True),
    Column("File MB", lambda row: number(row.size_mb), names_row=True),
    Column("Accuracy % (95 % CI)", _accuracy_cell),
    Column("Δ points", lambda row: points(row.delta_points)),
    Column("Median ms (95 % CI)", _latency_cell, is_timing=True),
    Column("p90 ms", lambda row: number(row.p90_ms), is_timing=True),
    Column("p99 ms", lambda row: number(row.p99_ms), is_timing=True),
    Column("Min ms", lambda row: number(row.min_ms), is_timing=True),
    Column("CPU ms", lambda row: number(row.cpu_ms), is_timing=True),
    Column("Wall/CPU", lambda row: number(row.wall_per_cpu), is_timing=True),
    Column("Load ms", lambda row: number(row.load_ms), is_timing=True),
    Column("Memory MB", lambda row: number(row.memory_mb), is_timing=True),
    Column("ms/GFLOP", lambda row: number(row.ms_per_gflop), is_timing=True),
)
