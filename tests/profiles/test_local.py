"""This machine as a device: whatever happens to the runner's process becomes a result."""

import os
from pathlib import Path

import psutil
import pytest
from tiny_models import PYTHON

from profiles.devices import local


def run(code, time_limit_s=60.0):
    """A process that runs Python `code` where the runner should be."""
    return local.run(local.RunSpec(Path("m.onnx"), "onnxruntime", (), time_limit_s), command=(PYTHON, "-c", code))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, sys; print('last words', file=sys.stderr); sys.stderr.flush(); os.abort()", "SIGABRT: last words"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", "crashed with signal 3"),
        ("print('not json')", "printed something that is not a result, exit code 0"),
        ("print([1, 2])", "printed something that is not a result"),
        ("print('{}')", "printed something that is not a result"),
        ("raise SystemExit('ran out')", "printed no result, exit code 1: ran out"),
        ('print(\'{"error": "honest"}\'); raise SystemExit(1)', "honest"),
        ("print('{\"wall_ms\": [1]}'); raise SystemExit(9)", "exit code 9 after its result"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe' * 100000)", "printed something that is not a result"),
    ],
)
def test_a_failure_has_a_reason(code, reason):
    result = run(code)
    assert list(result) == ["error"]
    assert reason in result["error"]


def test_a_hang_ends_at_the_time_limit_with_all_that_it_started(tmp_path):
    script = tmp_path / "hang.sh"
    script.write_text(f"tail -f /dev/null & echo $! > {tmp_path}/child; wait")
    spec = local.RunSpec(Path("m.onnx"), "onnxruntime", (), 1.0)
    result = local.run(spec, command=("/bin/sh", str(script)))
    assert result == {"error": "no result within 1 s, the time limit; stopped"}
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_grandchild_that_holds_the_output_open_delays_nothing():
    code = "import subprocess; subprocess.Popen(['tail', '-f', '/dev/null']); print('{\"wall_ms\": [1]}')"
    assert run(code, time_limit_s=600) == {"wall_ms": [1]}


def test_the_device_is_stable_and_names_nobody():
    first, second = local.describe(), local.describe()
    assert first == second
    assert first.id.startswith("local:")
    assert first.id.endswith(f"-{os.cpu_count()}-cores")
    assert first.machine["cores"] == os.cpu_count()
    assert first.machine["memory_gb"] > 0
    for personal in (os.uname().nodename, Path.home().name):
        assert personal not in first.id + first.os_build
