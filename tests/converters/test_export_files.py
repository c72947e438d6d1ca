"""Files as strangers read them: by the runtimes and the formats' own readers, never through our own code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from export_models import lively_small, pictures

import converters
from converters import parity
from converters.artifact import Metadata
from converters.signature import Size

FORMATS = ("onnx", "tflite", "coreml")


def module_outputs(module, inputs):
    with torch.no_grad():
        return module(torch.from_numpy(inputs["image"])).numpy()


def assert_close(actual, expected, allowed=1e-4):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < allowed * expected.std()


def ort_session(path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def embedded_text(form: str, path: Path) -> str:
    """The metadata as the format's own reader finds it."""
    if form == "onnx":
        return {item.key: item.value for item in onnx.load(path).metadata_props}["edgevit"]
    if form == "coreml":
        import coremltools

        return coremltools.models.MLModel(str(path), skip_model_load=True).user_defined_metadata["edgevit"]
    model = schema.Model.GetRootAs(path.read_bytes(), 0)
    entries = {model.Metadata(i).Name(): model.Metadata(i).Buffer() for i in range(model.MetadataLength())}
    return model.Buffers(entries[b"EDGEVIT_METADATA"]).DataAsNumpy().tobytes().decode()


def test_names_and_what_each_file_says_of_itself(small_files):
    assert {form: item.path.name for form, item in small_files.items()} == {
        "onnx": "small.onnx",
        "tflite": "small.tflite",
        "coreml": "small.mlpackage",
    }
    assert {form: (item.metadata.precision, item.metadata.batch) for form, item in small_files.items()} == {
        "onnx": ("fp32", "dynamic"),
        "tflite": ("fp32", 1),
        "coreml": ("fp16", 1),
    }
    folder = small_files["onnx"].path.parent
    assert sorted(path.name for path in folder.iterdir()) == ["small.mlpackage", "small.onnx", "small.tflite"]


@pytest.mark.parametrize("form", FORMATS)
def test_metadata_read_by_the_formats_own_reader(form, small, small_files):
    data = json.loads(embedded_text(form, small_files[form].path))
    assert data["model"] == "small"
    assert data["sizes"] == ["64", "96"]
    assert data["labels"][6] == "class 6"
    assert data["preprocessing"]["mean"] == [0.1, 0.2, 0.3]
    assert data["source_sha256"] == "ab" * 32
    assert data["parameters"] == sum(parameter.numel() for parameter in small.parameters())
    assert "torch" in data["versions"]
    # A dynamic file is proven at sizes that nobody asked for too.
    listed, unlisted = ["64", "96"], ["72", "64x72"] if form == "onnx" else []
    assert [(item["size"], item["output"]) for item in data["verified"]] == [(s, "logits") for s in listed + unlisted]
    assert all(0 < item["max_abs_over_std"] <= parity.TOLERANCE[data["precision"]] for item in data["verified"])
    golden = Metadata.from_json(json.dumps(data)).golden
    assert golden.size == "64"
    expected = module_outputs(small, golden.inputs)
    np.testing.assert_allclose(golden.outputs["logits"], expected, rtol=1e-5, atol=1e-5)


def test_flops_are_those_of_the_formula(small_files):
    height, c = 64, 16
    pixels, tokens = (height // 2) ** 2, (height // 4) ** 2
    convolutions = pixels * c * 3 * 9 + tokens * c * 9
    attention = 2 * tokens * tokens * c
    linear = tokens * c * 3 * c + c * 7
    assert small_files["onnx"].metadata.flops["64"] == 2 * (convolutions + attention + linear)


def test_golden_pictures_pack_into_little(small, small_files):
    assert len(embedded_text("onnx", small_files["onnx"].path)) < 12_000
    session = ort_session(small_files["onnx"].path)
    golden = small_files["onnx"].metadata.golden
    (logits,) = session.run(None, golden.inputs)
    assert_close(logits, golden.outputs["logits"])


@pytest.mark.parametrize("size", ["64", "96", "32", "40x72", "136x64"])
@pytest.mark.parametrize("batch", [1, 3])
def test_onnx_runs_at_listed_and_unlisted_sizes_and_batches(size, batch, small, paths):
    inputs = pictures(Size.parse(size), batch)
    (logits,) = ort_session(paths["onnx"]).run(["logits"], inputs)
    assert_close(logits, module_outputs(small, inputs))


def test_onnx_carries_no_traces_of_the_machine(paths):
    content = paths["onnx"].read_bytes()
    model = onnx.load(paths["onnx"])
    onnx.checker.check_model(model, full_check=True)
    assert [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    ] == [["batch", 3, "height", "width"]]
    assert b"stack_trace" not in content
    assert str(Path(__file__).parent).encode() not in content
    assert not {"BatchNormalization"} & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("size", ["64", "96"])
def test_tflite_has_a_signature_per_size(size, small, paths):
    interpreter = Interpreter(model_path=str(paths["tflite"]))
    names = {"inputs": ["image"], "outputs": ["logits"]}
    assert interpreter.get_signature_list() == {"size_64": names, "size_96": names}
    inputs = pictures(Size.parse(size), 1)
    logits = interpreter.get_signature_runner(f"size_{size}")(**inputs)["logits"]
    assert_close(logits, module_outputs(small, inputs))


def test_tflite_keeps_its_buffers_aligned_and_its_weights_once(small, paths):
    content = paths["tflite"].read_bytes()
    model = schema.Model.GetRootAs(content, 0)
    start = np.frombuffer(content, np.uint8).ctypes.data
    arrays = [model.Buffers(i).DataAsNumpy() for i in range(model.BuffersLength()) if model.Buffers(i).DataLength()]
    assert len(arrays) > 5
    assert all((array.ctypes.data - start) % 16 == 0 for array in arrays)
    weights = small.qkv.weight.detach().numpy().tobytes()
    assert content.count(weights) == 1


def test_coreml_has_a_function_per_size_with_float32_outside(paths):
    import coremltools

    description = coremltools.utils.load_spec(str(paths["coreml"])).description
    assert description.defaultFunctionName == "size_64"
    assert [function.name for function in description.functions] == ["size_64", "size_96"]
    float32 = coremltools.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
    for function, side in zip(description.functions, (64, 96), strict=True):
        (image,), (logits,) = function.input, function.output
        assert (image.name, logits.name) == ("image", "logits")
        assert list(image.type.multiArrayType.shape) == [1, 3, side, side]
        assert list(logits.type.multiArrayType.shape) == [1, 7]
        assert {image.type.multiArrayType.dataType, logits.type.multiArrayType.dataType} == {float32}


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """One size, batch 1: fp16 ONNX, and fp32 Core ML for iOS 16, of a model with more weights than nodes."""
    wide = lively_small(channels=64)
    out = tmp_path_factory.mktemp("halves")
    files = {}
    for form, precision in (("onnx", "fp16"), ("coreml", "fp32")):
        (files[form],) = converters.export(
            wide,
            wide.signature,
            name="wide",
            out=out,
            formats=[form],
            sizes=[Size.parse("32")],
            precision=precision,
            batch=1,
            sample_inputs=pictures,
        )
    return wide, files


def test_onnx_in_fp16_of_one_size(halves):
    wide, files = halves
    assert files["onnx"].path.name == "wide-fp16.onnx"
    model = onnx.load(files["onnx"].path)
    assert {init.data_type for init in model.graph.initializer if len(init.dims) > 1} == {onnx.TensorProto.FLOAT16}
    (image,), (logits,) = model.graph.input, model.graph.output
    assert [dim.dim_value for dim in image.type.tensor_type.shape.dim] == [1, 3, 32, 32]
    assert {image.type.tensor_type.elem_type, logits.type.tensor_type.elem_type} == {onnx.TensorProto.FLOAT}
    inputs = pictures(Size.parse("32"), 1)
    assert_close(ort_session(files["onnx"].path).run(None, inputs)[0], module_outputs(wide, inputs), 4e-2)


def test_coreml_in_fp32_for_ios16(halves):
    import coremltools

    _, files = halves
    assert files["coreml"].path.name == "wide-fp32-32.mlpackage"
    spec = coremltools.utils.load_spec(str(files["coreml"].path))
    assert spec.specificationVersion == 7  # iOS 16
    assert not spec.description.functions
    assert files["coreml"].metadata.target == "ios16"
    assert files["coreml"].metadata.verified[0].max_abs_over_std < 1e-4
