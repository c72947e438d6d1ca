"""TFLite files of any module, read by LiteRT and by its flatbuffer schema alone."""

from __future__ import annotations

import flatbuffers
import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from export_models import lively_small, pictures
from foreign_models import Ports

from converters import tflite
from converters.errors import EdgeVitError
from converters.quiet import quiet
from converters.signature import Size

SIZES = Size.parse_list("96,64")


def converted(module, signature, sizes, path, **options):
    with quiet():
        notes = tflite.convert(
            module.eval(), signature, sizes, path, **({"precision": "fp32", "batch": 1, "samples": {}} | options)
        )
    assert notes == []
    return path


def tables(path):
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))


def constants(model, of_type):
    """Elements of every constant of a type, each buffer once."""
    found = {
        tensor.buffer: int(np.prod(tensor.shape))
        for subgraph in model.subgraphs
        for tensor in subgraph.tensors
        if tensor.type == of_type and model.buffers[tensor.buffer].data is not None
    }
    return sum(found.values())


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with more weights than operations, and its files by (precision, debug_info): 96 first, then 64."""
    module, folder = lively_small(channels=64), tmp_path_factory.mktemp("wide")
    files = {}
    for precision, debug in (("fp32", True), ("fp16", False)):
        path = folder / f"{precision}.tflite"
        files[precision] = converted(module, module.signature, SIZES, path, precision=precision, debug_info=debug)
    return module, files


def test_half_precision_is_inside_and_float32_outside(wide):
    module, files = wide
    model = tables(files["fp16"])
    half, full = constants(model, schema.TensorType.FLOAT16), constants(model, schema.TensorType.FLOAT32)
    assert half > 20 * full
    weights = module.qkv.weight.detach().numpy().astype(np.float16).tobytes()
    assert files["fp16"].read_bytes().count(weights) == 1  # both sizes read the same bytes
    assert files["fp16"].stat().st_size < 0.62 * files["fp32"].stat().st_size

    interpreter = Interpreter(model_path=str(files["fp16"]))
    assert list(interpreter.get_signature_list()) == ["size_96", "size_64"]
    for size in SIZES:
        runner = interpreter.get_signature_runner(size.entry_point)
        details = [*runner.get_input_details().values(), *runner.get_output_details().values()]
        assert {item["dtype"] for item in details} == {np.float32}
        inputs = pictures(size, 1)
        with torch.no_grad():
            expected = module(torch.from_numpy(inputs["image"])).numpy()
        error = np.abs(runner(**inputs)["logits"] - expected).max() / expected.std()
        assert 1e-6 < error < 2e-2  # float16 it is, and near enough


def test_weights_that_stayed_float32_are_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(tflite, "_halved", lambda content: content)
    with pytest.raises(EdgeVitError, match=r"fp16: 100% of this model's weights stay float32.*export fp32"):
        converted(small, small.signature, SIZES[1:], tmp_path / "x.tflite", precision="fp16")
    assert not list(tmp_path.iterdir())


def test_a_weight_beyond_float16_is_refused(tmp_path):
    module = lively_small()
    with torch.no_grad():
        module.head.weight[0, 0] = 1e5
    with pytest.raises(EdgeVitError, match="beyond 65,504"):
        converted(module, module.signature, SIZES[1:], tmp_path / "x.tflite", precision="fp16")


def test_tensors_are_named_after_their_module(wide):
    _, files = wide
    content = files["fp16"].read_bytes()
    assert b"converters.wrap" not in content
    assert b"export_models.Small" not in content
    names = {tensor.name.decode().split(";")[0] for tensor in tables(files["fp16"]).subgraphs[0].tensors}
    every = [tensor.name for subgraph in tables(files["fp16"]).subgraphs for tensor in subgraph.tensors]
    assert len(set(every)) == len(every)
    assert {"stem_norm", "depthwise", "qkv", "head"} <= names | {name.split("_dequant")[0] for name in names}
    assert b"export_models.Small" in files["fp32"].read_bytes()  # with debug_info


def test_names_of_a_strangers_ports(tmp_path):
    """A dict, an output that is an input, one that is returned twice, whole numbers and truth values; no sizes."""
    torch.manual_seed(0)
    module = Ports()
    path = converted(module, module.signature, (Size(()),), tmp_path / "ports.tflite")
    interpreter = Interpreter(model_path=str(path))
    (ports,) = interpreter.get_signature_list().values()
    assert list(interpreter.get_signature_list()) == ["size_fixed"]
    assert sorted(ports["inputs"]) == ["keep", "tokens", "x"]
    assert sorted(ports["outputs"]) == ["again", "alpha", "same", "zeta"]
    arrays = {
        "tokens": np.array([[1, 9, 4]]),
        "keep": np.array([[True, False, True]]),
        "x": np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32),
    }
    with torch.no_grad():
        expected = module(*(torch.from_numpy(array) for array in arrays.values()))
    found = interpreter.get_signature_runner("size_fixed")(**(arrays | {"tokens": arrays["tokens"].astype(np.int32)}))
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_metadata_can_be_put_in_again_and_again(wide, tmp_path):
    _, files = wide
    path = tmp_path / "x.tflite"
    path.write_bytes(files["fp16"].read_bytes())
    before = tables(path)
    for text in ("first", "second, which is longer " * 1000, "third"):
        tflite.embed(path, text)
        assert tflite.read(path) == text
    after = tables(path)
    assert len(after.metadata) == len(before.metadata) + 1
    assert constants(after, schema.TensorType.FLOAT16) == constants(before, schema.TensorType.FLOAT16)
    assert path.stat().st_size < files["fp16"].stat().st_size + 300


def test_weights_that_lie_behind_the_flatbuffer_come_through(wide, tmp_path):
    """Where quantisers put large buffers, by an offset into the file, which embedding moves."""
    module, files = wide
    model, start = tables(files["fp32"]), 1 << 20
    buffer = max((item for item in model.buffers if item.data is not None), key=lambda item: len(item.data))
    behind = bytes(buffer.data)
    buffer.data, buffer.offset, buffer.size = None, start, len(behind)
    builder = flatbuffers.Builder(start)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    path = tmp_path / "behind.tflite"
    path.write_bytes(bytes(builder.Output()).ljust(start, b"\0") + behind)
    tflite.embed(path, "text")
    assert path.stat().st_size < start
    inputs = pictures(SIZES[0], 1)
    with torch.no_grad():
        expected = module(torch.from_numpy(inputs["image"])).numpy()
    logits = Interpreter(model_path=str(path)).get_signature_runner("size_96")(**inputs)["logits"]
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
