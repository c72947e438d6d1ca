"""Which file to ship: the Pareto front of accuracy against latency, and one sentence that says what and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiles.report import text
from profiles.report.data import Row, Section


@dataclass(frozen=True)
class Choice:
    """`row` is what to ship, or None where the figures do not allow a recommendation; `sentence` says so either way."""

    row: Row | None
    sentence: str
    rule: str
    front: tuple[Row, ...]


def pareto_front(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Ranked rows that no other beats: none is as fast and as accurate, and better in one. The fastest comes first."""
    ranked = sorted((row for row in rows if row.is_ranked), key=lambda row: (_latency(row), -_accuracy(row)))
    front: list[Row] = []
    for row in ranked:
        best = front[-1] if front else None
        if best is None or _accuracy(row) > _accuracy(best):
            front.append(row)
        elif (_latency(row), _accuracy(row)) == (_latency(best), _accuracy(best)):
            front.append(row)  # an exact tie: neither beats the other
    return tuple(front)


def choose(section: Section, budget_ms: float | None = None) -> Choice:
    """Picks what to ship on one device, in one sentence. Rows without an accuracy, failed or wrong ones never win.

    Without a budget: the fastest on the front whose accuracy interval overlaps that of the most accurate. With one:
    the most accurate whose latency, to the upper end of its interval, is within `budget_ms`.
    """
    front = pareto_front(section.rows)
    if not front:
        return Choice(None, _without_ranking(section) + _where(section), _rule(budget_ms), ())
    best = max(front, key=_accuracy)
    if budget_ms is None:
        row: Row | None = next(item for item in front if _overlap(item, best))
    else:
        fitting = [item for item in section.rows if item.is_ranked and _upper(item) <= budget_ms]
        row = max(fitting, key=lambda item: (_accuracy(item), -_latency(item)), default=None)
    if row is None:
        sentence = (
            f"Nothing measured here stays within {text.number(budget_ms)} ms; the fastest is {_figures(front[0])}"
        )
    else:
        sentence = f"Ship {_figures(row)}{_alternative(row, front)}"
    return Choice(row, sentence + _where(section), _rule(budget_ms), front)


def _rule(budget_ms: float | None) -> str:
    if budget_ms is None:
        return (
            "The pick is the fastest file on the Pareto front whose 95 % accuracy interval overlaps that of the most "
            "accurate one. Overlap means that these images cannot tell the two apart, not that they are equal."
        )
    return (
        f"The pick is the most accurate file whose latency, up to the upper end of its 95 % interval, is within the "
        f"budget of {text.number(budget_ms)} ms; between equals, the faster."
    )


def _without_ranking(section: Section) -> str:
    timed = [row for row in section.rows if row.is_timed]
    if not timed:
        return "Nothing to recommend: no file was timed here with the right output"
    fastest = min(timed, key=_latency)
    return (
        "Latency only, so nothing is recommended: no accuracy of the timed files is stored. "
        f"The fastest is {_figures(fastest)}"
    )


def _figures(row: Row) -> str:
    """`mobilevit_xxs.tflite at 64: 98.1 % (95 % CI 96.1–99.1, n=360) at 1.92 ms (1.83–2.10) on 1 thread`"""
    assert row.latency_ms
    share = f"{text.accuracy(row.accuracy)} at " if row.accuracy else ""
    return f"{row.file} at {row.size}: {share}{text.milliseconds(row.latency_ms)} on {text.threads(row.threads)}"


def _alternative(row: Row, front: Sequence[Row]) -> str:
    """What more accuracy would cost, or, where the pick is the most accurate, what less of it would save."""
    best = max(front, key=_accuracy)
    faster = [item for item in front if _latency(item) < _latency(row)]
    other = best if _accuracy(best) > _accuracy(row) else (faster[-1] if faster else None)
    if other is None:
        return "; nothing measured here is more accurate or faster"
    gain = text.points(100 * (_accuracy(other) - _accuracy(row)))
    ratio = _latency(other) / _latency(row)
    cost = f"costs {text.times(ratio)} the time" if ratio >= 1 else f"takes {100 * ratio:.0f} % of the time"
    doubt = ", a difference within the intervals" if _overlap(other, row) else ""
    return f"; {_difference(other, row)} {cost} for {gain} points{doubt}"


def _difference(other: Row, row: Row) -> str:
    """Names `other` by no more than what sets it apart from `row`."""
    parts = [other.file] if other.file != row.file or other.path != row.path else []
    if other.size != row.size or not (parts or other.threads != row.threads):
        parts.append(f"at {other.size}" if parts else other.size)
    if other.threads != row.threads:
        parts.append(f"on {text.threads(other.threads)}")
    return " ".join(parts)


def _where(section: Section) -> str:
    if not any(row.is_timed for row in section.rows):
        return "."
    if section.is_this_machine:
        return f" ({text.THIS_MACHINE if section.is_cpu_only else text.THIS_MACHINE_ACCELERATED})."
    return f" (measured on {section.device_name})."


def _overlap(one: Row, other: Row) -> bool:
    assert one.accuracy
    assert other.accuracy
    return one.accuracy.interval.overlaps(other.accuracy.interval)


def _accuracy(row: Row) -> float:
    assert row.accuracy
    return row.accuracy.value


def _latency(row: Row) -> float:
    assert row.latency_ms
    return row.latency_ms.value


def _upper(row: Row) -> float:
    assert row.latency_ms
    return row.latency_ms.high
