"""The runner, as a device runs it: one file, copied alone, one JSON object out."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from tiny_models import PYTHON, expected_logits, picture, write_fake_runtime, write_onnx

from profiles import runner

QUICK = ("--min-runs", "4", "--max-runs", "6", "--max-seconds", "0", "--warm-up-seconds", "0.02")


def run(folder, *arguments):
    """The runner's exit code and JSON, from a copy that sees nothing else of this project."""
    script = shutil.copy(runner.__file__, folder / "runner.py")
    done = subprocess.run(
        [PYTHON, script, *map(str, arguments), "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert"])
def test_times_a_model_and_saves_its_first_output(runtime, tmp_path, tflite_file, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    onnx_file = write_onnx(tmp_path / "tiny.onnx")
    np.savez(tmp_path / "in.npz", image=picture("32"))
    signature = ("--signature", "size_32") if runtime == "litert" else ()
    code, result = run(
        tmp_path,
        *("--model", onnx_file if runtime == "onnxruntime" else tflite_file, "--runtime", runtime, "--threads", 2),
        *("--inputs", "in.npz", "--outputs", "out.npz", *signature, *QUICK),
    )
    assert code == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["logits"], expected_logits(picture("32")), atol=1e-5)
    assert len(result["wall_ms"]) == len(result["cpu_ms"]) == 4
    assert min(result["wall_ms"]) > 0
    assert min(result["load_ms"], result["first_run_ms"]) > 0
    assert 5 < result["memory_before_load_mb"] <= result["peak_memory_mb"] < 2000
    assert result["warm_up"]["runs"] > 0
    assert result["threads_started"] == 1  # the calling thread is the other
    assert 2 in result["threads_set"].values()
    assert {"platform", "python", "numpy", "runtime_version"} <= set(result)
    if runtime == "onnxruntime":
        assert result["ran_on"] == ["CPUExecutionProvider"]
        assert result["settings"] == {"session.intra_op.allow_spinning": "0"}
    else:
        assert result["ran_on"] == ["XNNPACK (1 partition)"]


def test_the_check_runs_other_inputs_through_another_signature(tmp_path, tflite_file):
    np.savez(tmp_path / "in.npz", image=picture("32"))
    np.savez(tmp_path / "check.npz", image=picture("16"))
    code, result = run(
        tmp_path,
        *("--model", tflite_file, "--runtime", "litert", "--inputs", "in.npz", "--signature", "size_32", *QUICK),
        *("--check", "check.npz", "--check-signature", "size_16", "--check-outputs", "checked.npz"),
    )
    assert code == 0, result
    np.testing.assert_allclose(np.load(tmp_path / "checked.npz")["logits"], expected_logits(picture("16")), atol=1e-5)


def test_describes_the_inputs(tmp_path, tflite_file):
    _, onnx = run(tmp_path, "--model", write_onnx(tmp_path / "tiny.onnx"), "--runtime", "onnxruntime", "--describe")
    assert onnx["inputs"] == [{"name": "image", "shape": ["batch", 3, "height", "width"], "dtype": "float32"}]
    _, tflite = run(tmp_path, "--model", tflite_file, "--runtime", "litert", "--describe")
    assert tflite["inputs"] == [{"name": "image", "shape": [1, 3, 16, 16], "dtype": "float32"}]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "garbage.onnx", "--runtime", "onnxruntime"), "INVALID_PROTOBUF"),
        (("--model", "garbage.tflite", "--runtime", "litert"), "not a valid Flatbuffer"),
        (("--model", "missing.onnx", "--runtime", "onnxruntime"), "no such file"),
        (("--model", "tiny.onnx", "--runtime", "onnxruntime"), "dimensions"),
    ],
)
def test_an_error_is_json_and_exit_code_1(arguments, reason, tmp_path):
    for name in ("garbage.onnx", "garbage.tflite"):
        (tmp_path / name).write_bytes(b"no model at all" * 9)
    write_onnx(tmp_path / "tiny.onnx", shape=(1, 3, 64, 64))
    np.savez(tmp_path / "in.npz", image=picture("32"))
    code, result = run(tmp_path, *arguments, "--inputs", "in.npz")
    assert code == 1
    assert list(result) == ["error"]
    assert reason in result["error"]


def test_what_a_runtime_prints_does_not_mix_with_the_result(tmp_path, monkeypatch):
    write_fake_runtime(tmp_path / "fake", monkeypatch, "os.write(1, b'chatter'); raise OSError('as it happens')")
    code, result = run(
        tmp_path, "--model", write_onnx(tmp_path / "tiny.onnx"), "--runtime", "onnxruntime", "--describe"
    )
    assert (code, result) == (1, {"error": "OSError: as it happens"})


def test_ends_when_its_host_is_gone(tmp_path, monkeypatch):
    write_fake_runtime(tmp_path / "fake", monkeypatch, "os.write(2, b'blocked'); os.read(os.pipe()[0], 1)")
    model = write_onnx(tmp_path / "tiny.onnx")
    arguments = ("--model", model, "--runtime", "onnxruntime", "--describe", "--stop-with-stdin")
    process = subprocess.Popen(
        [PYTHON, "-P", runner.__file__, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr.read(7) == b"blocked"
    process.stdin.close()  # what the kernel does to a host that was killed
    assert process.wait(timeout=60) == 1


class Clock:
    """Time that passes only while a model runs: its n-th run takes the n-th of `durations_ms`, the last for ever."""

    def __init__(self, monkeypatch, durations_ms, cpu_share=1.0):
        self.durations, self.share, self.runs, self.wall, self.cpu = durations_ms, cpu_share, 0, 0.0, 0.0
        monkeypatch.setattr(runner.time, "perf_counter", lambda: self.wall / 1e3)
        monkeypatch.setattr(runner.time, "perf_counter_ns", lambda: round(self.wall * 1e6))
        monkeypatch.setattr(runner.time, "process_time_ns", lambda: round(self.cpu * 1e6))

    def __call__(self):
        duration = self.durations[min(self.runs, len(self.durations) - 1)]
        self.wall, self.cpu, self.runs = self.wall + duration, self.cpu + duration * self.share, self.runs + 1


def test_warm_up_ends_at_the_first_two_windows_that_agree(monkeypatch):
    clock = Clock(monkeypatch, [40] * 5 + [30] * 5 + [20] * 5 + [20.3] * 5 + [10])
    assert runner._warm_up(clock, 10) == {"runs": 20, "steady": True, "medians_ms": pytest.approx([40, 30, 20, 20.3])}


def test_warm_up_gives_up_after_its_limit(monkeypatch):
    clock = Clock(monkeypatch, [100 * 0.9**n for n in range(200)])
    warm_up = runner._warm_up(clock, 0.7)
    assert (warm_up["steady"], warm_up["runs"]) == (False, 15)


def test_windows_of_a_fast_model_hold_more_runs(monkeypatch):
    warm_up = runner._warm_up(Clock(monkeypatch, [0.5]), 10)
    assert warm_up["runs"] == pytest.approx(2 * 100, abs=2)


def test_wall_and_cpu_of_each_run(monkeypatch):
    wall, cpu = runner._time_runs(Clock(monkeypatch, [8, 4, 6], cpu_share=0.5), 2, 3, 100)
    assert wall == pytest.approx([8, 4, 6])
    assert cpu == pytest.approx([4, 2, 3])


@pytest.mark.parametrize(
    ("min_runs", "max_runs", "max_seconds", "runs"), [(5, 50, 0, 5), (5, 50, 0.1, 10), (5, 50, 99, 50)]
)
def test_how_many_runs(min_runs, max_runs, max_seconds, runs, monkeypatch):
    wall, _ = runner._time_runs(Clock(monkeypatch, [10.001]), min_runs, max_runs, max_seconds)
    assert len(wall) == runs
