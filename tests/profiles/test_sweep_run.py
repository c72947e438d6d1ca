"""`edgevit sweep` on a run folder: exports what is missing, measures every file, compares it with the checkpoint."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import edgevit.sweep
from converters.artifact import METADATA_KEY, Artifact, Golden, Metadata, Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature, Size
from edgevit.cli import main
from edgevit.data.images import load_images
from edgevit.evaluation import accuracy_key, evaluate_module
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.sources import load_source
from profiles.store import Store
from profiles.sweep import Evaluation

LIMIT = 40
PREPROCESSING = Preprocessing(size="32")
DIGITS = tuple(str(digit) for digit in range(10))
WEIGHT = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    config = {
        "model": "mobilevit_xxs",
        "num_classes": 10,
        "classes": list(DIGITS),
        "data": "digits",
        "sizes": ["32", "64"],
        "base_size": "32",
        "preprocessing": dataclasses.asdict(PREPROCESSING),
        "seed": 0,
    }
    run = RunFolder.create(tmp_path / "run", config)
    safetensors.torch.save_file(create_model("mobilevit_xxs", 10).state_dict(), run.weights_path)
    return run


def write_classifier(path: Path, sizes, source_sha256) -> Artifact:
    """Ten logits from a picture's mean colour: a file that any runtime reads, made in no time."""
    image = np.random.default_rng(1).random((1, 3, 32, 32), dtype=np.float32)
    about = Metadata(
        model=path.stem,
        format="onnx",
        precision="fp32",
        batch="dynamic",
        sizes=tuple(map(str, sizes)),
        signature=Signature.image_classifier(10),
        source_sha256=source_sha256,
        versions={},
        preprocessing=PREPROCESSING,
        labels=DIGITS,
        golden=Golden("32", {"image": image}, {"logits": image.mean((2, 3)) @ WEIGHT}),
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["image", "axes"], ["means"], keepdims=0),
            helper.make_node("MatMul", ["means", "weight"], ["logits"]),
        ],
        "classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.array([2, 3], np.int64), "axes"), numpy_helper.from_array(WEIGHT, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model.metadata_props.add(key=METADATA_KEY, value=about.to_json())
    onnx.save(model, path)
    return Artifact(path, about)


@pytest.fixture
def exports(monkeypatch) -> list:
    """Replaces the exporter, which takes minutes; the list holds the formats and sizes that it was asked for."""
    asked = []

    def export(source, *, formats, sizes, out, progress):
        asked.append((formats, tuple(map(str, sizes))))
        if formats != ("onnx",):
            raise EdgeVitError("this converter is broken")
        return [write_classifier(out / f"{source.name}.onnx", sizes, source.sha256)]

    monkeypatch.setattr(edgevit.sweep, "export", export)
    return asked


def expected_accuracy(size: str) -> float:
    """Of `write_classifier`, computed without any runtime."""
    from edgevit.data.images import evaluation_transform
    from edgevit.evaluation import subset

    images, transform = load_images("digits", "test"), evaluation_transform(PREPROCESSING, Size.parse(size))
    chosen = subset(len(images), LIMIT)
    right = [np.argmax(transform(images.image(i)).numpy().mean((1, 2)) @ WEIGHT) == images.label(i) for i in chosen]
    return float(np.mean(right))


def test_a_run(run, exports):
    outcome = edgevit.sweep.sweep(run.path, formats=("onnx", "tflite"), limit=LIMIT)
    assert exports == [(("onnx",), ("32", "64")), (("tflite",), ("32", "64"))]
    assert outcome.db == run.db_path
    assert [(item.status, item.cell.size) for item in outcome.result.measurements] == [("ok", "32"), ("ok", "64")]
    # The broken converter costs its own cells, with the reason.
    assert {failure.reason for failure in outcome.result.failures} == {"this converter is broken"}
    assert {key.size: metric.value for key, metric in outcome.result.metrics} == {
        size: pytest.approx(expected_accuracy(size)) for size in ("32", "64")
    }
    source, images = load_source(run.path), load_images("digits", "test")
    for size in run.sizes:
        expected = evaluate_module(source.module, images, size, PREPROCESSING, LIMIT)
        key = accuracy_key(source.sha256, size, images, PREPROCESSING, LIMIT)
        assert outcome.checkpoint[str(size)] == Store(run.db_path).metric(key) == expected

    exports.clear()
    result = CliRunner().invoke(main, ["sweep", str(run.path), "--format", "onnx", "--limit", str(LIMIT)])
    assert result.exit_code == 0, result.output
    assert not exports
    assert f"2 measurements and 2 accuracies in {run.db_path}" in result.output
    assert "mobilevit_xxs.onnx" in result.output
    assert f"{expected_accuracy('32'):.2%}" in result.output


def test_files_of_other_weights_and_missing_sizes_are_exported_again(run, exports):
    source = load_source(run.path)
    write_classifier(run.artifacts / "mobilevit_xxs.onnx", run.sizes, "0" * 64)
    library = edgevit.sweep._prepare(source, run.artifacts, ("onnx",), run.sizes, lambda step: None)
    assert exports.pop() == (("onnx",), ("32", "64"))
    assert library.find("mobilevit_xxs.onnx", run.sizes[0]) == run.artifacts / "mobilevit_xxs.onnx"
    more = (Size.parse("96"), *run.sizes[:1])
    edgevit.sweep._prepare(source, run.artifacts, ("onnx",), more, lambda step: None)
    assert exports.pop() == (("onnx",), ("64", "96", "32"))  # 64, which it held, is not lost


def test_a_folder_of_files_is_swept_over_the_sizes_that_they_hold(tmp_path):
    write_classifier(tmp_path / "one.onnx", (32,), "")
    write_classifier(tmp_path / "two.onnx", (32, 64), "")
    outcome = edgevit.sweep.sweep(tmp_path)
    found = {(item.artifact["name"], item.cell.size) for item in outcome.result.measurements}
    assert found == {("one.onnx", "32"), ("two.onnx", "32"), ("two.onnx", "64")}
    assert not outcome.result.failures
    assert not outcome.result.metrics
    assert outcome.db == tmp_path / "runs.db"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "no such run folder"),
        (lambda folder: folder, r"holds no run and no \.onnx, \.tflite, \.mlpackage file"),
        (lambda folder: (folder / "garbage.onnx").write_bytes(b"garbage") and folder, "no file says which sizes"),
    ],
)
def test_targets_that_cannot_be_meant(make, message, tmp_path):
    with pytest.raises(EdgeVitError, match=message):
        edgevit.sweep.sweep(make(tmp_path))


def test_a_runtime_that_crashes_on_the_pictures_costs_one_accuracy(tmp_path, monkeypatch):
    path = write_classifier(tmp_path / "one.onnx", (32,), "").path
    images = load_images("digits", "test")
    with edgevit.sweep._Evaluator("digits", images, LIMIT) as evaluator:
        evaluation = evaluator.evaluate(path, Size.parse("32"))
        assert isinstance(evaluation, Evaluation)
        monkeypatch.setattr(edgevit.sweep, "_evaluate", _abort)
        with pytest.raises(EdgeVitError, match="its runtime crashed at size 32"):
            evaluation.measure()
        monkeypatch.undo()
        assert evaluation.measure().value == pytest.approx(expected_accuracy("32"))


def _abort(*arguments):
    os.abort()
