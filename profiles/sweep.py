"""A grid of measurements, and the accuracy of each artifact, into a store. Killed at any moment, it goes on there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.errors import EdgeVitError
from converters.signature import Size
from profiles.profile import cell_of, failed, profile
from profiles.store import AccuracyKey, Measurement, Metric, Store

FINISHED = ("ok", "not_run", "wrong_on_device")  # a failed cell is tried again by the next sweep


@dataclass(frozen=True)
class Plan:
    """What to measure: every size of every format (or file: any name that `make_artifact` knows), by threads."""

    formats: tuple[str, ...]
    sizes: tuple[Size, ...]
    threads: tuple[int, ...] = (1,)
    processes: int = 3
    time_limit_s: float = 120

    def cells(self) -> list[tuple[int, Size, str]]:
        """(threads, size, format) in the order of measuring.

        The format changes fastest: what the machine does in the meantime (heat, another program) then falls on all
        formats alike, where artifact after artifact would give the last one the warm machine.
        """
        return [(threads, size, fmt) for threads in self.threads for size in self.sizes for fmt in self.formats]


@dataclass(frozen=True)
class Evaluation:
    """An accuracy that can be measured: `key` and `data_name` are known before `measure()` is called."""

    key: AccuracyKey
    data_name: str
    measure: Callable[[], Metric]


@dataclass(frozen=True)
class Failure:
    """Something that has no result after the sweep: what, and why in one line."""

    what: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps; `text` says what has just begun or ended."""

    done: int
    total: int
    text: str


@dataclass
class SweepResult:
    """The plan's measurements, in its order, fresh or found in the store; its metrics; and what has no result."""

    measurements: list[Measurement] = field(default_factory=list)
    metrics: list[tuple[AccuracyKey, Metric]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def sweep(
    plan: Plan,
    store: Store,
    *,
    make_artifact: Callable[[str, Size], Path | None],
    evaluate: Callable[[Path, Size], Evaluation] | None = None,
    measure: Callable[..., Measurement] = profile,
    progress: Callable[[Progress], None] = lambda step: None,
) -> SweepResult:
    """Measures what `store` does not hold yet; each row is committed as soon as it is there.

    `make_artifact(format, size)` gives the file (it may make it), or None where none is meant to be;
    `evaluate(path, size)` says which accuracy is to be measured, once an artifact and size whatever the number of
    threads; None measures latency only. `measure` is called as `profile` is. An exception of any of them ends that cell
    with its reason, never the sweep; only what ends the process (an interrupt, a kill) does, and the same call then
    goes on where it stopped.
    """
    return _Sweep(plan, store, make_artifact, evaluate, measure, progress).run()


class _Sweep:
    """One sweep under way: the steps done, and the result so far."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        make_artifact: Callable[[str, Size], Path | None],
        evaluate: Callable[[Path, Size], Evaluation] | None,
        measure: Callable[..., Measurement],
        progress: Callable[[Progress], None],
    ) -> None:
        self.plan, self.store, self.report = plan, store, progress
        self.make_artifact, self.evaluate, self.measure = make_artifact, evaluate, measure
        self.done, self.result = 0, SweepResult()
        self.evaluated: set[tuple[Size, str]] = set()

    def run(self) -> SweepResult:
        for threads, size, fmt in self.plan.cells():
            name = f"{fmt} {size} threads={threads}"
            path = self._try(name, functools.partial(self.make_artifact, fmt, size))
            if path is None:
                self._step(f"{name}: no artifact")
            else:
                self._measure(path, size, threads, name)
            self._evaluate(path, size, fmt)
        return self.result

    def _measure(self, path: Path, size: Size, threads: int, name: str) -> None:
        cell = self._try(name, lambda: cell_of(path, size=size, threads=threads))
        if cell is None:
            return self._step(f"{name}: cannot be measured")
        found = self.store.measurement(cell)
        if found is None or found.status not in FINISHED:
            self._say(f"{name}: measuring")
            plan = self.plan
            try:
                found = self.measure(
                    path, size=size, threads=threads, processes=plan.processes, time_limit_s=plan.time_limit_s
                )
            except Exception as error:  # a cell ends with a reason; the sweep goes on
                found = failed(path, _reason(error), size=size, threads=threads)
            self.store.add_measurement(found)
        self.result.measurements.append(found)
        if found.status == "failed":
            self.result.failures.append(Failure(name, found.reason))
        self._step(f"{name}: {outcome(found)}")

    def _evaluate(self, path: Path | None, size: Size, fmt: str) -> None:
        if self.evaluate is None or (size, fmt) in self.evaluated:
            return
        self.evaluated.add((size, fmt))
        name = f"{fmt} {size} accuracy"
        if path is None:
            return self._step(f"{name}: no artifact")
        metric = self._try(name, lambda: self._metric(path, size, name))
        self._step(f"{name}: {metric.value:.2%}" if metric else f"{name}: failed")

    def _metric(self, path: Path, size: Size, name: str) -> Metric:
        assert self.evaluate is not None
        evaluation = self.evaluate(path, size)
        metric = self.store.metric(evaluation.key)
        if metric is None:
            self._say(f"{name}: measuring")
            metric = evaluation.measure()
            self.store.add_metric(evaluation.key, evaluation.data_name, metric)
        self.result.metrics.append((evaluation.key, metric))
        return metric

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None with its exception noted as a failure."""
        try:
            return action()
        except Exception as error:
            self.result.failures.append(Failure(what, _reason(error)))
            return None

    @property
    def total(self) -> int:
        plan = self.plan
        pairs = len(plan.sizes) * len(plan.formats)
        return pairs * len(plan.threads) + (pairs if self.evaluate else 0)

    def _step(self, text: str) -> None:
        self.done += 1
        self._say(text)

    def _say(self, text: str) -> None:
        self.report(Progress(self.done, self.total, text))


def outcome(measurement: Measurement) -> str:
    """One measurement in a few words: its median and interval, or why it has none."""
    if measurement.status != "ok":
        return f"{measurement.status.replace('_', ' ')} ({measurement.reason})"
    summary = measurement.summary
    return f"{summary['median_ms']:.2f} ms [{summary['median_low_ms']:.2f}, {summary['median_high_ms']:.2f}]"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, EdgeVitError) else f"{type(error).__name__}: {text}"
