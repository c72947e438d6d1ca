"""This machine as a device: every run of the runner is a fresh process, and whatever happens to it becomes a result.

A device is a module with `describe()` and `run(spec)`, so another kind stands beside this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from profiles import runner

RUNNER = Path(runner.__file__)
MAX_OUTPUT_BYTES = 1 << 26  # a runner that prints more than this has gone wrong


@dataclass(frozen=True)
class RunSpec:
    """One process: `arguments` are the runner's, without `--model` and `--runtime`."""

    model: Path
    runtime: str
    arguments: tuple[str, ...]
    time_limit_s: float


@dataclass(frozen=True)
class Device:
    """Where a measurement was made. `id` tells machines apart and holds nothing personal, such as a host's name."""

    id: str
    os_build: str
    machine: dict[str, Any]


def describe() -> Device:
    cpu, cores = _cpu_model(), os.cpu_count() or 1
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", cpu.lower())).strip("-")
    machine = {
        "cpu": cpu,
        "cores": cores,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "memory_gb": round(psutil.virtual_memory().total / (1 << 30), 1),
    }
    return Device(f"local:{slug}-{cores}-cores", platform.platform(), machine)


def run(spec: RunSpec, *, command: tuple[str, ...] = (sys.executable, "-P", str(RUNNER))) -> dict[str, Any]:
    """What the runner printed, or `{"error": reason}` after a crash, a hang, garbage or an error of its own.

    The process and all that it started are killed after `spec.time_limit_s`, or when this process ends. Never raises
    for what happens inside it. `-P`, because the runner's folder holds modules named like the standard library's.
    """
    arguments = [*command, "--model", str(spec.model), "--runtime", spec.runtime, *spec.arguments]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        # Files, not pipes: a pipe fills up, and one that a stray grandchild holds open never ends.
        process = subprocess.Popen(
            [*arguments, "--json", "--stop-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait(spec.time_limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {spec.time_limit_s:g} s, the time limit; stopped"}
        finally:
            _kill_group(process)
        return _result(process.returncode, _read(stdout), _read(stderr))


def _result(code: int, stdout: str, stderr: str) -> dict[str, Any]:
    lines = stderr.strip().splitlines()
    last_words = f": {lines[-1].strip()[:300]}" if lines else ""
    if code < 0:
        return {"error": f"crashed with {_signal_name(-code)}{last_words}"}
    try:
        result = json.loads(stdout)
    except ValueError:
        result = None
    if not isinstance(result, dict) or not ({"wall_ms", "inputs", "error"} & set(result)):
        what = "printed no result" if not stdout.strip() else "printed something that is not a result"
        return {"error": f"{what}, exit code {code}{last_words}"}
    if code and "error" not in result:
        return {"error": f"exit code {code} after its result{last_words}"}
    return result


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The process and its children; the session that it leads holds nothing else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


def _read(stream: Any) -> str:
    stream.seek(0)
    return stream.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()
