"""Latency of one artifact on this machine: several fresh processes, every sample kept, the output checked."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.artifact import artifact_sha256, size_bytes
from converters.errors import EdgeVitError
from converters.signature import Size
from profiles import runner
from profiles.devices import local
from profiles.inputs import UNREADABLE, CannotRunError, Inputs, Target, judge, make_inputs, open_target, read_arrays
from profiles.statistics import summarise
from profiles.store import Cell, Measurement, Status

PROTOCOL_VERSION = 1  # raise it when figures of the old and the new way to measure must not be ranked together
MIN_PROCESSES = 3
BUSY_WALL_PER_CPU = 1.2
CORE_ML_REASON = "checked here, not timed: needs an Apple device"


@dataclass(frozen=True)
class Protocol:
    """How long one process measures: at least `min_runs`, then until `max_runs` or `max_seconds`."""

    min_runs: int = 20
    max_runs: int = 200
    max_seconds: float = 4.0
    warm_up_seconds: float = 4.0

    @property
    def arguments(self) -> tuple[str, ...]:
        """As the runner takes them."""
        return tuple(
            part for name, value in asdict(self).items() for part in (f"--{name.replace('_', '-')}", str(value))
        )


def profile(
    path: Path,
    *,
    size: Size | None = None,
    threads: int = 1,
    processes: int = 3,
    time_limit_s: float = 120,
    protocol: Protocol | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Measurement:
    """Measures one cell on this machine.

    `size` may be left out where the file has one size, or gives a preferred one. `time_limit_s` is for one process. A
    file without this project's metadata is measured too; then nothing says what its output should be. A crash, a hang,
    a garbage file or a wrong output is a result (`status`, `reason`), not an exception.

    Raises EdgeVitError for a path, size, count or runtime that cannot be meant.
    """
    _check_counts(threads=threads, processes=processes, time_limit_s=time_limit_s)
    target = open_target(path, size)
    cell = _cell(target, threads)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    protocol = protocol or Protocol()
    circumstances = _circumstances(protocol, processes, time_limit_s, started_at)

    def finish(status: Status, reason: str = "", results: list[dict[str, Any]] | None = None) -> Measurement:
        results = results or []
        summary = summarise(results) if status != "failed" and results else {}
        return Measurement(cell, status, _describe_artifact(target), reason, results, summary, circumstances)

    if target.format == "coreml":
        return finish("not_run", CORE_ML_REASON)
    try:
        inputs = make_inputs(target, time_limit_s)
    except CannotRunError as error:
        return finish("failed", str(error))
    circumstances["check"] = "golden output" if inputs.golden else f"finite outputs only: {target.unchecked_because}"

    results: list[dict[str, Any]] = []
    for number in range(1, processes + 1):
        progress(f"process {number} of {processes}")
        result = _run_process(target, inputs, threads, protocol, time_limit_s)
        if "error" in result:
            return finish("failed", f"process {number} of {processes}: {result['error']}", [*results, result])
        results.append(result)
    circumstances["ran_on"] = results[0]["ran_on"]
    circumstances["threads_set"] = results[0]["threads_set"]
    circumstances["warm_up_steady"] = sum(result["warm_up"]["steady"] for result in results)
    wrong = next((result["wrong"] for result in results if result["wrong"]), "")
    return finish("wrong_on_device" if wrong else "ok", wrong, results)


def cell_of(path: Path, *, size: Size | None = None, threads: int = 1) -> Cell:
    """The cell that `profile` with these arguments would measure; runs nothing. Raises EdgeVitError as it does."""
    return _cell(open_target(path, size), threads)


def failed(path: Path, reason: str, *, size: Size | None = None, threads: int = 1) -> Measurement:
    """The measurement of a cell that has nothing but the reason why. Raises EdgeVitError as `profile` does."""
    target = open_target(path, size)
    return Measurement(_cell(target, threads), "failed", _describe_artifact(target), reason)


def is_busy(summary: dict[str, Any]) -> bool:
    """Whether the runs waited for a core. A run computes on at least one, so on a quiet machine wall is at most CPU."""
    return (summary["wall_per_cpu"] or 0) > BUSY_WALL_PER_CPU


def _cell(target: Target, threads: int) -> Cell:
    device = local.describe()
    return Cell(
        artifact_sha256=artifact_sha256(target.path),
        size=str(target.size or "fixed"),
        batch=target.batch,
        runtime=target.runtime,
        runtime_version="" if target.format == "coreml" else _runtime_version(target.runtime),
        accelerator="cpu",
        threads=threads,
        device_id=device.id,
        os_build=device.os_build,
        protocol_version=PROTOCOL_VERSION,
    )


def _runtime_version(runtime: str) -> str:
    try:
        return runner.runtime_version(runtime)
    except ImportError as error:
        package = {"onnxruntime": "onnxruntime", "litert": "ai-edge-litert"}[runtime]
        raise EdgeVitError(f"{runtime} is not installed here ({error}); pip install {package}") from error


def _run_process(
    target: Target, inputs: Inputs, threads: int, protocol: Protocol, time_limit_s: float
) -> dict[str, Any]:
    """One process's result with `golden_error` and `wrong` (the reason, or "") added."""
    with tempfile.TemporaryDirectory(prefix="edgevit-") as name:
        folder = Path(name)
        np.savez(folder / "inputs.npz", **inputs.timed)  # type: ignore[arg-type]
        arguments = ["--threads", str(threads), "--inputs", str(folder / "inputs.npz")]
        arguments += ["--outputs", str(folder / "outputs.npz"), *protocol.arguments]
        if signature := target.signature(str(target.size)):
            arguments += ["--signature", signature]
        if inputs.check is not None:
            np.savez(folder / "check.npz", **inputs.check)  # type: ignore[arg-type]
            arguments += ["--check", str(folder / "check.npz"), "--check-outputs", str(folder / "checked.npz")]
            arguments += ["--check-signature", inputs.check_signature] if inputs.check_signature else []
        load_before = _load_average()
        result = local.run(local.RunSpec(target.path, target.runtime, tuple(arguments), time_limit_s))
        if "error" in result:
            return result
        try:
            outputs = read_arrays(folder / "outputs.npz")
            checked = outputs if inputs.check is None else read_arrays(folder / "checked.npz")
        except UNREADABLE as error:
            return {"error": f"its outputs cannot be read ({error})"}
    precision = target.metadata.precision if target.metadata else ""
    golden_error, wrong = judge(outputs, checked, inputs.golden, precision)
    return result | {"load_average_before": load_before, "golden_error": golden_error, "wrong": wrong}


def _describe_artifact(target: Target) -> dict[str, Any]:
    metadata = target.metadata
    return {
        "name": target.path.name,
        "model": metadata.model if metadata else target.path.stem,
        "format": target.format,
        "precision": metadata.precision if metadata else "",
        "size_bytes": size_bytes(target.path),
        "flops": metadata.flops.get(str(target.size)) if metadata else None,
        "parameters": (metadata.parameters or None) if metadata else None,
        "source_sha256": metadata.source_sha256 if metadata else "",
        "file": str(target.path),
    }


def _circumstances(protocol: Protocol, processes: int, time_limit_s: float, started_at: str) -> dict[str, Any]:
    device = local.describe()
    packages = ("onnxruntime", "ai-edge-litert", "numpy", "edgevit")
    return {
        "machine": device.machine,
        "os": device.os_build,
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
        "protocol": {
            "version": PROTOCOL_VERSION,
            **asdict(protocol),
            "processes": processes,
            "time_limit_s": time_limit_s,
        },
        "load_average_before": _load_average(),
        "started_at": started_at,
    }


def _check_counts(*, threads: int, processes: int, time_limit_s: float) -> None:
    if threads < 1:
        raise EdgeVitError(f"threads {threads}: at least 1")
    if processes < MIN_PROCESSES:
        raise EdgeVitError(f"processes {processes}: at least {MIN_PROCESSES}, or nothing shows how far they differ")
    if time_limit_s <= 0:
        raise EdgeVitError(f"time limit {time_limit_s:g} s: more than 0")


def _load_average() -> float | None:
    """Processes that wanted a core, averaged over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
