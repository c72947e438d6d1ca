"""`edgevit export` of a MobileViT-XXS in a run folder: the command as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from converters import run
from converters.artifact import Preprocessing
from converters.signature import Size
from edgevit.cli import main
from edgevit.data.images import evaluation_transform, load_images
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder

CONFIG = {
    "model": "mobilevit_xxs",
    "num_classes": 10,
    "classes": [str(digit) for digit in range(10)],
    "data": "digits",
    "sizes": ["64", "96"],
    "base_size": "64",
    "seed": 0,
    "preprocessing": {
        "size": "64",
        "crop_fraction": 1.0,
        "interpolation": "bilinear",
        "channel_order": "RGB",
        "scale": 1 / 255,
        "mean": [0.0, 0.0, 0.0],
        "std": [1.0, 1.0, 1.0],
    },
}


def edgevit(*arguments):
    """The command in this process: quicker."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model():
    """Trained for a few steps: at random weights, rounding to fp16 is a fiftieth of what tells pictures apart."""
    images = load_images("digits", "train")
    transform = evaluation_transform(Preprocessing.from_json(CONFIG["preprocessing"]), Size.parse("64"))
    pictures = torch.stack([transform(images.image(index)) for index in range(640)])
    labels = torch.tensor([images.label(index) for index in range(640)])
    torch.manual_seed(0)
    model = create_model("mobilevit_xxs", 10)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(20):
        chosen = slice(32 * step, 32 * (step + 1))
        torch.nn.functional.cross_entropy(model(pictures[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The run folder, and what the command said: ONNX and Core ML at both sizes of the run, TFLite at one."""
    folder = RunFolder.create(tmp_path_factory.mktemp("run") / "digits", CONFIG)
    save_file(model.state_dict(), folder.weights_path)
    program = [sys.executable, "-c", "from edgevit.cli import main; main()", "export", str(folder.path)]
    said = []
    for options in (["--format", "onnx,coreml"], ["--format", "tflite", "--sizes", "96"]):
        result = subprocess.run([*program, *options], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        said.append(result.stdout)
    return folder, "".join(said)


def test_every_format_at_the_runs_sizes_into_the_runs_artifacts(exported):
    folder, said = exported
    names = ["mobilevit_xxs-64.mlpackage", "mobilevit_xxs-96.mlpackage", "mobilevit_xxs.onnx", "mobilevit_xxs.tflite"]
    assert sorted(path.name for path in folder.artifacts.iterdir()) == names
    for name in names:
        assert f"{folder.artifacts / name}  " in said
    assert said.count("checked with the evaluator, not on Apple hardware") == 2
    assert said.count("size 64: logits error") == 2
    assert said.count("size 96: logits error") == 3
    # Nothing but our own lines: none of the converters' logs.
    starts = ("mobilevit_xxs", str(folder.artifacts), "  size ", "  checked ", "lint: ")
    assert [line for line in said.splitlines() if not line.startswith(starts)] == []
    # The file for both sizes is dynamic, and is said to be so once.
    [dynamic] = [line for line in said.splitlines() if line.startswith("lint: dynamic")]
    assert dynamic.endswith("(mobilevit_xxs.onnx)")


def test_files_classify_held_out_pictures_as_the_model_does(exported, model):
    folder, _ = exported
    images = load_images("digits", "test")
    size = Size.parse("96")
    transform = evaluation_transform(folder.preprocessing, size)
    batch = torch.stack([transform(images.image(index)) for index in range(0, 100, 20)])
    with torch.no_grad():
        expected = model(batch).numpy()
    for path in folder.artifacts.iterdir():
        if path.name == "mobilevit_xxs-64.mlpackage":
            continue
        session = run.load(path, size=size)
        logits = np.concatenate([session.run({"image": picture[None].numpy()})["logits"] for picture in batch])
        assert np.abs(logits - expected).max() < (4e-2 if path.is_dir() else 1e-4) * expected.std()
        assert session.metadata.labels == tuple("0123456789")


@pytest.mark.parametrize(("height", "width"), [(32, 32), (160, 160), (224, 96), (96, 320)])
def test_onnx_at_sizes_whose_last_map_is_odd(height, width, exported, model):
    folder, _ = exported
    session = onnxruntime.InferenceSession(str(folder.artifacts / "mobilevit_xxs.onnx"))
    pictures = torch.rand(3, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(pictures).numpy()
    (logits,) = session.run(None, {"image": pictures.numpy()})
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mobilevit_xxl"], "mobilevit_xxl: no model, run folder or checkpoint of that name; did you mean"),
        (["mobilevit_xxs", "--sizes", "100"], "size 100: height must be a multiple of 32; nearest: 96 or 128"),
        (["mobilevit_xxs", "--labels", "missing.txt"], "missing.txt: cannot be read"),
        (["mobilevit_xxs", "--rewrites", "fold"], "unknown rewrite 'fold'; there are export_form"),
        (["mobilevit_xxs", "--weights", "missing.safetensors"], "missing.safetensors"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(arguments, line, tmp_path):
    said = edgevit("export", *arguments, "--out", tmp_path / "out")
    assert said.exit_code == 2
    assert line in said.stderr
    assert said.stderr.startswith("edgevit: ")
    assert said.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_lists_and_labels_as_people_and_editors_write_them(small_files, monkeypatch, tmp_path):
    def export(source, *, rewrites, labels, **options):
        given.append((rewrites, labels))
        return [small_files["tflite"]]

    given = []
    monkeypatch.setattr("edgevit.export.export", export)
    (tmp_path / "labels.txt").write_bytes("\ufeffcat\r\nKätzchen\r\n".encode())
    options = ["--rewrites", "fold_batch_norm, split_qkv", "--labels", tmp_path / "labels.txt"]
    assert edgevit("export", "mobilevit_xxs", *options).exit_code == 0
    assert given == [(["fold_batch_norm", "split_qkv"], ("cat", "Kätzchen"))]


def test_a_model_whose_outputs_say_nothing_exits_3(tmp_path, model):
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    save_file(model.state_dict() | {"classifier.weight": torch.zeros(10, 320)}, folder.weights_path)
    said = edgevit("export", folder.path, "--format", "onnx")
    assert (said.exit_code, said.stdout) == (3, "")
    assert "would prove nothing" in said.stderr
    assert list(folder.artifacts.iterdir()) == []


def test_json_is_all_of_stdout(small_files, monkeypatch):
    def export(source, *, progress, **options):
        progress("converting")
        print("a module that prints")
        return [small_files["tflite"]]

    monkeypatch.setattr("edgevit.export.export", export)
    said = edgevit("export", "mobilevit_xxs", "--json")
    (item,) = json.loads(said.stdout)
    assert item["path"] == str(small_files["tflite"].path)
    assert item["size_bytes"] == small_files["tflite"].path.stat().st_size
    assert [entry["size"] for entry in item["verified"]] == ["64", "96"]
    assert said.stderr == "converting\na module that prints\n"
