"""`edgevit formats`, `inspect` and `verify` as a user types them: what they print, what they refuse, exit codes."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from safetensors.torch import save_file

from converters.artifact import SUFFIXES
from converters.capabilities import capabilities
from converters.errors import EdgeVitError
from converters.plan import FORMATS, PRECISIONS, TARGETS, check_arguments
from converters.signature import Signature, Size
from edgevit.cli import main
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder

SIGNATURE = Signature.image_classifier(10)


def edgevit(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of mobilevit_xxs whose logits differ from picture to picture, with its ONNX file at 32 and 64."""
    folder = RunFolder.create(
        tmp_path_factory.mktemp("run") / "digits",
        {
            "model": "mobilevit_xxs",
            "num_classes": 10,
            "classes": [str(digit) for digit in range(10)],
            "data": "digits",
            "sizes": ["32", "64"],
            "base_size": "32",
            "seed": 0,
            "preprocessing": {
                "size": "32",
                "crop_fraction": 1.0,
                "interpolation": "bilinear",
                "channel_order": "RGB",
                "scale": 1 / 255,
                "mean": [0.0, 0.0, 0.0],
                "std": [1.0, 1.0, 1.0],
            },
        },
    )
    torch.manual_seed(0)
    model = create_model("mobilevit_xxs", 10).train()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None
    with torch.no_grad():
        model(torch.rand(16, 3, 64, 64) * torch.linspace(0.1, 1, 16)[:, None, None, None])
        model.classifier.weight *= 10
    save_file(model.state_dict(), folder.weights_path)
    result = edgevit("export", folder.path, "--format", "onnx")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def file(run):
    return run.artifacts / "mobilevit_xxs.onnx"


@pytest.fixture
def tampered(file, tmp_path):
    """The file with the weights of one layer changed."""
    model = onnx.load(file)
    tensor = next(item for item in model.graph.initializer if item.name.endswith("stage2.0.project.conv.weight"))
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.5, tensor.name))
    onnx.save(model, tmp_path / "tampered.onnx")
    return tmp_path / "tampered.onnx"


def test_formats_are_those_that_export_takes():
    found = json.loads(edgevit("formats", "--json").output)
    assert {item["format"] for item in found} == set(FORMATS)
    assert {target for item in found for target in item["targets"]} == set(TARGETS)
    for item in found:
        form, targets = item["format"], item["targets"] or TARGETS[:1]
        assert item["suffix"] == SUFFIXES[form]
        assert sorted(item["precisions"]) == sorted(PRECISIONS[form])
        for precision in item["precisions"]:
            for target in targets:
                check_arguments(SIGNATURE, (form,), (Size.parse("64"),), precision, 1, target)
    with pytest.raises(EdgeVitError):
        check_arguments(SIGNATURE, ("caffe",), (Size.parse("64"),), None, 1, "ios16")
    sizes = {(item.format, item.targets): item.sizes for item in capabilities()}
    assert sizes["coreml", ("ios16", "ios17")] == "one file per size"
    assert sizes["coreml", ("ios18",)] == "one function each"
    assert sizes["tflite", ()].startswith("one signature each")


def test_formats_as_a_table():
    result = edgevit("formats")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 1 + len(capabilities())
    assert all(word in lines[0] for word in ("format", "suffix", "precision", "sizes", "batch", "runs here with"))
    assert "not timed here: needs an Apple device" in result.output


def test_inspect_says_what_the_file_is(file):
    result = edgevit("inspect", file)
    assert result.exit_code == 0, result.output
    for expected in (
        "onnx, opset 18",
        "input  image: float32 ? × 3 × ? × ? (free: batch, height, width)",
        "output logits: float32 ? × 10",
        "Conv ",
        "edgevit: mobilevit_xxs, fp32, sizes 32, 64, any batch",
        "verified at 32: logits error",
        "labels: 10 (0, 1, 2, …)",
        "lint: dynamic: ",
        "numbers stored: float32 9",
    ):
        assert expected in result.output


def test_inspect_writes_nothing_that_a_terminal_would_act_on(file, tmp_path):
    model = onnx.load(file)
    model.producer_name = "maker\x1b[2J"
    model.graph.name = "graph\r\nlint: nothing found\u202e"
    model.metadata_props.add(key="key\x1b]0;title\x07", value="first\nsecond\x9b31m")
    about = next(item for item in model.metadata_props if item.key == "edgevit")
    about.value = json.dumps(json.loads(about.value) | {"model": "name\x1b[31m"})
    onnx.save(model, tmp_path / "x.onnx")
    result = edgevit("inspect", tmp_path / "x.onnx")
    assert result.exit_code == 0, result.output
    assert all(character.isprintable() for line in result.output.split("\n") for character in line)
    for escaped in (
        r"name\x1b[31m",
        r"graph\r\nlint: nothing found\u202e",
        r"key\x1b]0;title\x07: first\nsecond\x9b31m",
    ):
        assert escaped in result.output
    about.value = '{"a\x1b[2J\\nb": 1}'
    onnx.save(model, tmp_path / "x.onnx")
    for command in ("inspect", "profile"):
        assert "\x1b" not in edgevit(command, tmp_path / "x.onnx").output


def test_inspect_for_machines(file):
    data = json.loads(edgevit("inspect", file, "--json").output)
    assert data["edgevit"]["model"] == "mobilevit_xxs"
    assert all(item["source"] for item in data["lint"])


def test_inspect_refuses_what_is_no_model(tmp_path):
    (tmp_path / "page.tflite").write_text("<html>404</html>")
    result = edgevit("inspect", tmp_path / "page.tflite")
    assert result.exit_code == 2
    assert result.output == f"edgevit: {tmp_path / 'page.tflite'}: not a TFLite model\n"


def test_verify_agrees_at_every_size(run, file):
    result = edgevit("verify", file, "--against", run.path, "--bisect")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("logits")] == [["logits", "32"], ["logits", "64"]]
    assert "every floating-point output agrees on this example; no module differs" in lines
    assert lines[-1] == f"{file}: agrees with the module (fp32)"


def test_verify_names_the_module_that_differs(run, tampered):
    result = edgevit("verify", tampered, "--against", run.path, "--bisect")
    assert result.exit_code == 3
    assert "in module 'stage2.0.project.conv', called at mobilevit.py:" in result.output
    assert result.output.splitlines()[-1].startswith(f"edgevit: {tampered}: output 'logits' at size ")
    table = [line for line in result.output.splitlines() if line.endswith(" differs")]
    assert len(table) == 1
    assert table[0].startswith("stage2.0.project.conv ")


def test_verify_for_machines(run, tampered):
    result = CliRunner().invoke(main, ["verify", str(tampered), "--against", str(run.path), "--bisect", "--json"])
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["bisection"]["culprit"]["module"] == "stage2.0.project.conv"
    assert "fp32 allows 0.0001" in data["failure"]
    assert [item["size"] for item in data["verified"]] == ["32", "64"]


def test_verify_at_another_size_and_against_another_model(run, file):
    result = edgevit("verify", file, "--against", run.path, "--size", "96")
    assert result.exit_code == 0, result.output
    result = edgevit("verify", file, "--against", "mobilevit_xs")
    assert result.exit_code in (2, 3)
    assert len(result.output.splitlines()[-1]) < 300
    result = edgevit("verify", file, "--against", "nonsense")
    assert result.exit_code == 2
