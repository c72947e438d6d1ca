"""inspect: what is in a file, held against the module and against other readers; what is no model is one line."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from ai_edge_litert.interpreter import Interpreter
from onnx import TensorProto, helper, numpy_helper

from converters.contents import read_contents
from converters.coreml import parse_specification, specification_file
from converters.errors import EdgeVitError
from converters.inspection import inspect, operations

FORMATS = ("onnx", "tflite", "coreml")
SUFFIXES = {"onnx": ".onnx", "tflite": ".tflite", "coreml": ".mlpackage"}
CORPUS = sorted(Path(onnx.__file__).parent.glob("backend/test/data/**/*.onnx"))[::12] + sorted(
    Path(onnxruntime.__file__).parent.glob("datasets/*.onnx")
)


@pytest.mark.parametrize("form", FORMATS)
def test_signature_metadata_and_parameters_are_the_modules(form, paths, small):
    inspection = inspect(paths[form])
    contents, meta = inspection.contents, inspection.artifact
    functions = ["main_graph"] if form == "onnx" else ["size_64", "size_96"]
    assert [function.name for function in contents.functions] == functions
    for function, side in zip(contents.functions, (64, 96), strict=False):
        [image], [logits] = function.inputs, function.outputs
        assert (image.name, image.dtype, logits.name, logits.dtype) == ("image", "float32", "logits", "float32")
        assert image.shape == ((None, 3, None, None) if form == "onnx" else (1, 3, side, side))
        assert logits.shape == (None if form == "onnx" else 1, 7)
    assert (meta.model, meta.sizes, len(inspection.labels)) == ("small", ("64", "96"), 7)
    assert inspection.problems == ()
    # Without the folded BatchNorms: their scale and shift are in the convolutions, one of which got a bias for it.
    expected = sum(p.numel() for p in small.parameters()) - 4 * 16 + 16
    dtype = "float16" if form == "coreml" else "float32"
    stored = sum(weight.count for weight in contents.weights if weight.dtype == dtype and weight.count > 1)
    assert expected - 32 <= stored <= expected  # a converter may merge the norm into the linear layer after it
    assert inspection.parameters[dtype] >= stored
    assert contents.size_bytes == sum(
        file.stat().st_size
        for file in ([paths[form]] if form != "coreml" else paths[form].rglob("*"))
        if file.is_file()
    )


def test_operations_are_those_of_another_reader(paths):
    graph = onnx.load(paths["onnx"]).graph
    [function] = read_contents(paths["onnx"]).functions
    assert operations(function) == dict(Counter(node.op_type for node in graph.node))
    interpreter = Interpreter(model_path=str(paths["tflite"]))
    first = read_contents(paths["tflite"]).functions[0]
    counted = Counter(item["op_name"] for item in interpreter._get_ops_details())
    counted.pop("DELEGATE", None)
    assert operations(first) == dict(counted)


def test_layers_are_named_after_modules(paths):
    for form in FORMATS:
        layers = {node.layer for node in read_contents(paths[form]).nodes}
        assert {"stem", "depthwise", "qkv", "head"} <= layers


def test_json_holds_everything(paths):
    for form in FORMATS:
        data = json.loads(json.dumps(inspect(paths[form]).to_json()))
        assert data["format"] == form
        assert data["functions"][0]["inputs"][0]["name"] == "image"
        assert data["edgevit"]["sizes"] == ["64", "96"]
        assert {"parameters", "size_bytes", "lint", "labels"} <= set(data)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_files_of_other_makers_are_read(path):
    model = onnx.load(path, load_external_data=False)
    inspection = inspect(path)
    assert inspection.artifact is None
    [function] = inspection.contents.functions
    initializers = {item.name for item in model.graph.initializer}
    assert [value.name for value in function.inputs] == [
        item.name for item in model.graph.input if item.name not in initializers
    ]
    assert len(function.nodes) >= len(model.graph.node)


def external(folder, location, *, write=True):
    """An ONNX model whose one weight lies in another file."""
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "weight")
    tensor = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [tensor],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    if write:
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).write_bytes(weight.raw_data)
    return path


def test_weights_in_another_file_count(tmp_path):
    path = external(tmp_path, "parts/weights.bin")
    inspection = inspect(path)
    assert inspection.contents.size_bytes == path.stat().st_size + 64
    assert inspection.parameters == {"float32": 16}
    assert inspection.problems == ()


def test_missing_and_cut_weights_are_named(tmp_path):
    assert inspect(external(tmp_path, "gone.bin", write=False)).problems == ("weights are missing: gone.bin",)
    (tmp_path / "gone.bin").write_bytes(b"\0" * 63)
    assert "gone.bin (cut short: 63 bytes of 64)" in inspect(tmp_path / "model.onnx").problems[0]


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin"])
def test_weights_outside_the_folder_are_not_followed(location, tmp_path):
    (tmp_path / "secret.bin").write_bytes(b"\0" * 64)
    folder = tmp_path / "model"
    folder.mkdir()
    inspection = inspect(external(folder, location, write=False))
    assert inspection.contents.files == (folder / "model.onnx",)
    assert inspection.problems == (f"weights are missing: {location} (outside the model's folder: not followed)",)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 64)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    assert "not followed" in inspect(external(folder, "link.bin", write=False)).problems[0]


@pytest.mark.parametrize("change", [{"sizes": None}, {"golden": {"size": "64", "inputs": [1], "outputs": {}}}, None])
def test_metadata_that_cannot_be_read_is_a_problem_not_an_end(change, paths, tmp_path):
    model = onnx.load(paths["onnx"])
    text = model.metadata_props[0].value
    model.metadata_props[0].value = "[" * 100_000 if change is None else json.dumps(json.loads(text) | change)
    onnx.save(model, tmp_path / "x.onnx")
    inspection = inspect(tmp_path / "x.onnx")
    assert inspection.artifact is None
    assert "edgevit metadata cannot be read" in inspection.problems[0]
    assert inspection.parameters["float32"] > 1000


def refused(path):
    with pytest.raises(EdgeVitError) as caught:
        inspect(path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_MODELS = {
    "empty": b"",
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "text": b"hello\n",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    "zip": b"PK\x03\x04" + b"\0" * 200,
    "identifier": b"\x1c\0\0\0TFL3" + random.Random(0).randbytes(300),
    "random": random.Random(1).randbytes(1000),
}


@pytest.mark.parametrize("kind", NO_MODELS)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_model_is_one_line(form, kind, tmp_path):
    path = tmp_path / f"x{SUFFIXES[form]}"
    path.write_bytes(NO_MODELS[kind])
    refused(path)


def test_folders_files_and_nothing(tmp_path, paths):
    for suffix in (".onnx", ".tflite", ".mlpackage"):
        (tmp_path / f"folder{suffix}").mkdir()
        refused(tmp_path / f"folder{suffix}")
        assert "no such file" in refused(tmp_path / f"none{suffix}")
    shutil.copy(paths["onnx"], tmp_path / "x.pt")
    assert "not an artifact; one ends in .onnx, .tflite, .mlpackage" in refused(tmp_path / "x.pt")
    refused(tmp_path)


@pytest.mark.parametrize("form", ["onnx", "tflite"])
def test_a_file_that_was_cut_anywhere_is_one_line(form, paths, tmp_path):
    content = paths[form].read_bytes()
    path = tmp_path / paths[form].name
    generator = random.Random(2)
    for length in {1, 8, len(content) - 1, *(generator.randrange(len(content)) for _ in range(60))}:
        path.write_bytes(content[:length])
        refused(path)


@pytest.mark.parametrize(
    "file", ["Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"]
)
def test_a_package_that_was_cut_anywhere_is_one_line(file, paths, tmp_path):
    package = tmp_path / "x.mlpackage"
    shutil.copytree(paths["coreml"], package)
    content = (package / file).read_bytes()
    generator = random.Random(3)
    for length in {0, 1, len(content) // 2, *(generator.randrange(len(content) - 64) for _ in range(15))}:
        (package / file).write_bytes(content[:length])
        refused(package)
    (package / file).unlink()
    refused(package)


def test_flipped_bytes_end_in_one_line_or_in_an_answer(paths, tmp_path):
    generator = random.Random(4)
    for form in ("onnx", "tflite"):
        content = paths[form].read_bytes()
        path = tmp_path / paths[form].name
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(generator.choice((1, 3, 20))):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            path.write_bytes(damaged)
            with contextlib.suppress(EdgeVitError):
                json.dumps(inspect(path).to_json())


def test_flipped_bytes_in_a_package_end_in_one_line_or_in_an_answer(paths, tmp_path):
    generator = random.Random(5)
    package = tmp_path / "x.mlpackage"
    shutil.copytree(paths["coreml"], package)
    file = package / "Data/com.apple.CoreML/model.mlmodel"
    content = file.read_bytes()
    for _ in range(120):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 3, 20))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        with contextlib.suppress(EdgeVitError):
            json.dumps(inspect(package).to_json())


def test_a_constant_that_nobody_named_is_one_line(tmp_path):
    node = helper.make_node("Constant", [], ["x"], value=numpy_helper.from_array(np.zeros(2, np.float32)))
    del node.output[:]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    model = helper.make_model(helper.make_graph([node], "g", [], [output]), ir_version=10)
    onnx.save(model, tmp_path / "x.onnx")
    assert "damaged ONNX model" in refused(tmp_path / "x.onnx")


@pytest.mark.parametrize("field", ["outputs", "dataType"])
def test_a_program_with_a_hole_is_one_line(field, paths, tmp_path):
    package = tmp_path / "x.mlpackage"
    shutil.copytree(paths["coreml"], package)
    file = specification_file(package)
    spec = parse_specification(file, package)
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            if field == "outputs":
                del next(item for item in block.operations if item.type == "const").outputs[:]
            else:
                block.operations[-1].outputs[0].type.tensorType.dataType = 999
    file.write_bytes(spec.SerializeToString())
    assert "damaged Core ML package" in refused(package)
