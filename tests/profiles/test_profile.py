"""One measurement: real files in real runtimes, and every way in which a file or a runtime can go wrong."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_models import QUICK, metadata, write_fake_runtime, write_onnx

from converters.errors import EdgeVitError
from converters.signature import Size
from profiles.inputs import judge
from profiles.profile import PROTOCOL_VERSION, cell_of, profile
from profiles.store import Store


@pytest.fixture
def onnx_file(tmp_path):
    return write_onnx(tmp_path / "tiny.onnx", about=metadata("onnx", ("16", "32"), golden_size="32"))


@pytest.mark.parametrize("size", ["16", "32"])
def test_measures_and_checks_an_artifact(size, onnx_file, tmp_path):
    measurement = profile(onnx_file, size=Size.parse(size), threads=2, protocol=QUICK)
    assert (measurement.status, measurement.reason) == ("ok", "")
    assert [len(process["wall_ms"]) for process in measurement.processes] == [5, 5, 5]
    assert all(process["golden_error"] < 1e-4 for process in measurement.processes)
    assert measurement.summary["samples"] == 15
    assert measurement.cell == cell_of(onnx_file, size=Size.parse(size), threads=2)
    cell = measurement.cell
    assert (cell.size, cell.batch, cell.runtime, cell.threads, cell.accelerator, cell.protocol_version) == (
        *(size, 1, "onnxruntime", 2, "cpu", PROTOCOL_VERSION),
    )
    artifact = measurement.artifact
    assert (artifact["name"], artifact["model"], artifact["format"]) == ("tiny.onnx", "tiny", "onnx")
    assert (artifact["precision"], artifact["flops"]) == ("fp32", 1000)
    assert artifact["size_bytes"] == onnx_file.stat().st_size
    circumstances = measurement.circumstances
    assert {"machine", "os", "python", "versions", "load_average_before", "started_at"} <= set(circumstances)
    assert circumstances["protocol"] | {"version": 1, "processes": 3, "max_runs": 5} == circumstances["protocol"]
    assert circumstances["check"] == "golden output"
    assert circumstances["ran_on"] == ["CPUExecutionProvider"]
    json.dumps(dataclasses.asdict(measurement))  # goes into the store as it is
    store = Store(tmp_path / "runs.db")
    store.add_measurement(measurement)
    assert store.measurement(cell).summary == measurement.summary


@pytest.mark.parametrize("size", ["16", "32"])  # of the golden output, and not
def test_another_output_than_the_golden_one_is_wrong_on_device(size, tmp_path):
    about = metadata("onnx", ("16", "32"), golden_size="32", golden_error=0.002)
    measurement = profile(write_onnx(tmp_path / "tiny.onnx", about=about), size=Size.parse(size), protocol=QUICK)
    assert measurement.status == "wrong_on_device"
    assert measurement.reason == "output 'logits' is 0.002 of its std from the golden output; at most 0.001"
    assert len(measurement.processes) == 3


def test_judges_outputs():
    golden = {"logits": np.array([[1.0, -1.0]], np.float32)}  # std 1
    near = {"logits": golden["logits"] + np.float32(0.03)}
    assert judge(near, near, golden, "fp16") == (pytest.approx(0.03), "")
    assert "at most 0.001" in judge(near, near, golden, "fp32")[1]
    assert judge(near, near, golden, "int8")[1] == ""
    assert "should be (1, 2)" in judge({}, {"logits": np.zeros(3)}, golden, "fp32")[1]
    assert "is None" in judge({}, {"other": np.zeros(3)}, golden, "fp32")[1]
    assert "not finite" in judge({"logits": np.array([np.nan])}, {}, None, "fp32")[1]
    assert "std from" in judge(golden, {"logits": np.full((1, 2), np.nan)}, golden, "fp32")[1]
    assert judge(golden, golden, None, "") == (None, "")


def test_the_size_is_one_that_the_file_offers(onnx_file):
    assert cell_of(onnx_file).size == "16"
    with pytest.raises(EdgeVitError, match=r"size 64 is not in the file, which has 16, 32"):
        profile(onnx_file, size=Size.parse("64"), protocol=QUICK)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"processes": 2}, "at least 3"), ({"threads": 0}, "at least 1"), ({"time_limit_s": 0}, "0")]
)
def test_counts_that_cannot_be_meant(wrong, message, onnx_file):
    with pytest.raises(EdgeVitError, match=message):
        profile(onnx_file, **wrong)


def test_paths_that_cannot_be_meant(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(EdgeVitError, match="no such file"):
        profile(tmp_path / "missing.onnx")
    with pytest.raises(EdgeVitError, match="not an artifact"):
        profile(tmp_path / "notes.txt")


def test_a_foreign_file_of_fixed_shapes_is_measured_unchecked(tflite_file, tmp_path):
    for path in (write_onnx(tmp_path / "foreign.onnx", shape=(1, 3, 16, 24)), tflite_file):
        measurement = profile(path, protocol=QUICK)
        assert measurement.status == "ok", measurement.reason
        assert measurement.cell.size == "fixed"
        assert measurement.circumstances["check"].startswith("finite outputs only")
        assert measurement.summary["samples"] == 15
        with pytest.raises(EdgeVitError, match="shapes are fixed; leave the size out"):
            profile(path, size=Size.parse("32"), protocol=QUICK)


def test_a_foreign_file_of_free_shapes_needs_a_size(tmp_path):
    path = write_onnx(tmp_path / "foreign.onnx")
    with pytest.raises(EdgeVitError, match=r"'image' has free dimensions \(batchx3xheightxwidth\); give its size"):
        profile(path, protocol=QUICK)
    measurement = profile(path, size=Size.parse("16x24"), protocol=QUICK)
    assert (measurement.status, measurement.cell.size) == ("ok", "16x24")


@pytest.mark.parametrize("name", ["garbage.onnx", "garbage.tflite"])
def test_garbage_is_a_failed_measurement_with_its_reason(name, tmp_path):
    (tmp_path / name).write_bytes(bytes(range(256)) * 8)
    measurement = profile(tmp_path / name, protocol=QUICK)
    assert measurement.status == "failed"
    assert measurement.reason
    assert not measurement.summary


@pytest.mark.parametrize(
    ("on_load", "reason"),
    [
        ("sys.stderr.write('unknown kernel'); sys.stderr.flush(); os.abort()", "crashed with SIGABRT: unknown kernel"),
        ("os.read(os.pipe()[0], 1)", "no result within 1 s, the time limit; stopped"),
        ("os._exit(0)", "printed no result, exit code 0"),
        ("raise RuntimeError('out of\\nluck')", "RuntimeError: out of luck"),
    ],
)
def test_a_runtime_that_fails_is_a_failed_measurement_with_its_reason(
    on_load, reason, onnx_file, tmp_path, monkeypatch
):
    write_fake_runtime(tmp_path / "fake", monkeypatch, on_load)
    measurement = profile(onnx_file, protocol=QUICK, time_limit_s=1 if "pipe" in on_load else 60)
    assert (measurement.status, measurement.reason) == ("failed", f"process 1 of 3: {reason}")
    assert measurement.processes == [{"error": reason}]
    assert measurement.cell == cell_of(onnx_file)


def test_core_ml_is_not_run(tmp_path):
    package = tmp_path / "tiny.mlpackage"
    package.mkdir()
    (package / "Manifest.json").write_text("{}")
    measurement = profile(package)
    assert (measurement.status, measurement.cell.runtime) == ("not_run", "coreml")
    assert measurement.reason == "checked here, not timed: needs an Apple device"
