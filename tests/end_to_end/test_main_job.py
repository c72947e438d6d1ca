"""The main job as a user runs it: train, export to three formats, sweep, report — each a process of its own."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.store import Store

SIZES = ("32", "64")
MODEL_BYTES_LIMIT = 200_000  # less than any file of a MobileViT-XXS


def edgevit(*args: str, cwd: Path, preexec=None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgevit", *map(str, args)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600, preexec_fn=preexec
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short training run. Its accuracy is low; every later check is a comparison with its own checkpoint."""
    folder = tmp_path_factory.mktemp("job")
    options = ("--data", "digits", "--sizes", ",".join(SIZES), "--out", "runs/digits", "--epochs", "2")
    done = edgevit("train", "mobilevit_xxs", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/digits"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    done = edgevit(
        "export", "runs/digits", "--format", "onnx,tflite,coreml", "--sizes", ",".join(SIZES), cwd=run.parents[1]
    )
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def swept(exported: Path) -> Path:
    done = edgevit("sweep", "runs/digits", cwd=exported.parents[1])
    assert done.returncode == 0, done.stderr
    return exported


def test_the_run_folder_holds_what_the_design_names(run: Path):
    assert {"config.toml", "model.safetensors", "metrics.jsonl", "state"} <= {item.name for item in run.iterdir()}
    assert all("step" in json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_three_formats_are_exported_under_their_names(exported: Path):
    names = {item.name for item in (exported / "artifacts").iterdir()}
    packages = {f"mobilevit_xxs-{size}.mlpackage" for size in SIZES}
    assert names == {"mobilevit_xxs.onnx", "mobilevit_xxs.tflite"} | packages


def test_the_sweep_measures_every_cell_and_the_accuracy_of_each_artifact(swept: Path):
    store = Store(swept / "runs.db")
    cells = {(m.artifact["format"], m.cell.size): m for m in store.measurements()}
    assert set(cells) == {(fmt, size) for fmt in ("onnx", "tflite", "coreml") for size in SIZES}
    for (fmt, size), measurement in cells.items():
        assert measurement.status == ("not_run" if fmt == "coreml" else "ok"), measurement.reason
        if fmt == "coreml":
            assert measurement.reason == "checked here, not timed: needs an Apple device"
        else:
            assert len(measurement.processes) >= 3
            assert (
                0 < measurement.summary["min_ms"] <= measurement.summary["median_ms"] <= measurement.summary["p99_ms"]
            )
        accuracy = {(key.artifact_sha256, key.size): metric for key, _, metric in store.metrics()}
        own = accuracy[measurement.cell.artifact_sha256, size]
        checkpoint = accuracy[measurement.artifact["source_sha256"], size]
        assert own.n == checkpoint.n >= 300
        assert abs(own.value - checkpoint.value) <= 0.005


def test_a_second_sweep_measures_nothing_again(swept: Path):
    before = [m.created_at for m in Store(swept / "runs.db").measurements()]
    done = edgevit("sweep", "runs/digits", cwd=swept.parents[1])
    assert done.returncode == 0, done.stderr
    assert [m.created_at for m in Store(swept / "runs.db").measurements()] == before


def test_the_report_is_one_page_and_its_twin(swept: Path):
    done = edgevit("report", "runs/digits", cwd=swept.parents[1])
    assert done.returncode == 0, done.stderr
    html, markdown = (swept / "report.html").read_text(), (swept / "report.md").read_text()
    assert "report.html" in done.stdout
    for text in (html, markdown):
        assert "checked here, not timed: needs an Apple device" in text
        assert "mobilevit_xxs.tflite" in text
        assert "mobilevit_xxs.onnx" in text


def test_evaluate_agrees_with_the_sweep(swept: Path):
    file = swept / "artifacts/mobilevit_xxs.onnx"
    done = edgevit("evaluate", file, "--data", "digits", "--sizes", "64", "--json", cwd=swept.parents[1])
    assert done.returncode == 0, done.stderr
    store = Store(swept / "runs.db")
    sha = next(m.cell.artifact_sha256 for m in store.measurements() if m.artifact["format"] == "onnx")
    expected = next(m.value for key, _, m in store.metrics() if (key.artifact_sha256, key.size) == (sha, "64"))
    assert f'"value": {expected}' in done.stdout


WRONG = {
    "unknown model": (("train", "mobilevit_xss", "--data", "digits", "--out", "new"), "mobilevit_xxs"),
    "unknown data": (("train", "mobilevit_xxs", "--data", "digit", "--out", "new"), "digit"),
    "size not a multiple of 32": (
        ("train", "mobilevit_xxs", "--data", "digits", "--sizes", "100", "--out", "new"),
        "96 or 128",
    ),
    "not a size": (("export", "mobilevit_xxs", "--sizes", "big", "--out", "new"), "192x320"),
    "size to export": (("export", "mobilevit_xxs", "--sizes", "100", "--out", "new"), "96 or 128"),
    "unknown format": (("export", "mobilevit_xxs", "--format", "onxx", "--out", "new"), "onnx"),
    "missing weights": (
        ("export", "mobilevit_xxs", "--weights", "none.safetensors", "--out", "new"),
        "none.safetensors",
    ),
    "foreign weights": (("export", "mobilevit_xxs", "--weights", "page.html", "--out", "new"), "page.html"),
    "missing file": (("profile", "none.onnx"), "none.onnx"),
    "not a model": (("profile", "page.html"), "page.html"),
    "cut file": (("profile", "cut.onnx"), "cut.onnx"),
    "cut tflite": (("evaluate", "cut.tflite", "--data", "digits"), "cut.tflite"),
    "empty folder of pictures": (("train", "mobilevit_xxs", "--data", "empty", "--out", "new"), "empty"),
    "unreadable image": (("train", "mobilevit_xxs", "--data", "pictures", "--sizes", "32", "--out", "new"), "bad.png"),
    "not a run": (("sweep", "empty"), "empty"),
    "nothing measured": (("report", "empty"), "empty"),
}


@pytest.mark.parametrize(("args", "hint"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_exit_2_and_leaves_nothing(args, hint, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.html").write_text("<html>not a model</html>")
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch" + b"\x00" * 9)
    (tmp_path / "cut.tflite").write_bytes(b"\x1c\x00\x00\x00TFL3" + b"\xff" * 40)
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nnot a picture")
    before = sorted(tmp_path.rglob("*"))
    done = edgevit(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert hint in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
    assert len(errors) == 1, done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("fmt", ["onnx", "tflite", "coreml"])
def test_a_full_disk_is_one_line_and_leaves_nothing(fmt, run, tmp_path):
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MODEL_BYTES_LIMIT, MODEL_BYTES_LIMIT))

    done = edgevit(
        "export", run, "--format", fmt, "--sizes", "32", "--out", tmp_path / "out", cwd=tmp_path, preexec=full
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("edgevit:")]) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not [item for item in tmp_path.rglob("*") if item.is_file()]
