"""Half precision in ONNX: what is float16, what stays float32 and why, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_models import lively_small, pictures
from foreign_models import Ports, Steep

from converters.errors import EdgeVitError
from converters.onnx import convert
from converters.onnx_fp16 import LARGEST, check_half, largest_values
from converters.quiet import quiet
from converters.signature import Signature, Size, TensorSpec

FIXED = Size(())


def steep(peak: float, folder, precision="fp16"):
    """(module, path, notes, inputs) of a model whose values reach about `peak`."""
    torch.manual_seed(0)
    module = Steep(peak).eval()
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)}
    path = folder / "steep.onnx"
    with quiet():
        notes = convert(
            module, module.signature, (FIXED,), path, precision=precision, batch="dynamic", samples={FIXED: inputs}
        )
    return module, path, notes, inputs


def weights(path):
    return {item.name: item for item in onnx.load(path).graph.initializer if np.prod(item.dims) >= 1024}


def run(path, inputs):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, inputs)[0]


def test_modest_values_are_all_halved(tmp_path):
    module, path, notes, inputs = steep(10, tmp_path)
    assert notes == []
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {item.data_type for item in weights(path).values()} == {onnx.TensorProto.FLOAT16}
    ports = [*model.graph.input, *model.graph.output]
    assert {port.type.tensor_type.elem_type for port in ports} == {onnx.TensorProto.FLOAT}
    with torch.no_grad():
        expected = module(torch.from_numpy(inputs["x"])).numpy()
    assert np.abs(run(path, inputs) - expected).max() < 1e-2 * expected.std()


def test_ops_that_leave_the_range_stay_in_float32_and_are_named(tmp_path):
    """All in float16 the product would be infinite, and so would be the logits."""
    module, path, notes, inputs = steep(1e6, tmp_path)
    with torch.no_grad():
        expected = module(torch.from_numpy(inputs["x"])).numpy()
    assert np.abs(run(path, inputs) - expected).max() < 1e-2 * expected.std()
    with torch.no_grad():
        peak = float((module.climb(module.first(torch.from_numpy(inputs["x"]))) * module.peak).abs().max())
    assert notes == [f"2 ops kept in fp32: Mul 'node_mul_4' reaches {max(peak, module.peak):,.0f}"]
    assert {item.data_type for item in weights(path).values()} == {onnx.TensorProto.FLOAT16}


def test_largest_values_are_those_of_the_module(tmp_path):
    module, path, _, inputs = steep(1e5, tmp_path, precision="fp32")
    found = largest_values(onnx.load(path), [inputs])
    with torch.no_grad():
        first = module.first(torch.from_numpy(inputs["x"]))
        high = module.climb(first) * module.peak
    values = list(found.values())
    for tensor in (first, high, module.climb.weight.detach(), torch.from_numpy(inputs["x"])):
        assert np.isclose(values, float(tensor.abs().max()), rtol=1e-5).any()
    assert max(values) > LARGEST


def test_inputs_without_a_batch_take_each_example_alone(tmp_path):
    """`samples` stack what the file takes one by one: (N, 8, 32) for an input (8, 32)."""
    torch.manual_seed(0)
    module = torch.nn.Linear(32, 64).eval()
    signature = Signature((TensorSpec("x", (8, 32)),), (TensorSpec("y", (8, 64)),))
    stacked = np.random.default_rng(0).normal(size=(3, 8, 32)).astype(np.float32)
    path, samples = tmp_path / "linear.onnx", {FIXED: {"x": stacked}}
    with quiet():
        convert(module, signature, (FIXED,), path, precision="fp16", batch=1, samples=samples)
    assert {item.data_type for item in weights(path).values()} == {onnx.TensorProto.FLOAT16}
    with torch.no_grad():
        expected = module(torch.from_numpy(stacked[0])).numpy()
    assert np.abs(run(path, {"x": stacked[0]}) - expected).max() < 1e-2 * expected.std()


def test_weights_that_are_still_float32_are_refused(tmp_path):
    _, path, _, _ = steep(10, tmp_path, precision="fp32")
    with pytest.raises(EdgeVitError, match=r"weight '.*' is still float32 \(3 in all\)"):
        check_half(onnx.load(path), [])


def test_a_model_that_is_large_everywhere_is_told_to_stay_in_float32(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)).eval()
    with torch.no_grad():
        module[0].weight.mul_(1e6)
        module[1].weight.mul_(1e6)
    inputs = {"x": np.ones((2, 32), np.float32)}
    with pytest.raises(EdgeVitError, match="export fp32 instead"), quiet():
        convert(
            module,
            Steep.signature,
            (FIXED,),
            tmp_path / "large.onnx",
            precision="fp16",
            batch="dynamic",
            samples={FIXED: inputs},
        )


def test_whole_numbers_and_truth_values_stay_what_they_are(tmp_path):
    module = Ports().eval()
    inputs = {
        "tokens": np.array([[1, 9, 4]]),
        "keep": np.array([[True, False, True]]),
        "x": np.ones((1, 3, 4), np.float32),
    }
    path = tmp_path / "ports.onnx"
    with quiet():
        convert(module, module.signature, (FIXED,), path, precision="fp16", batch="dynamic", samples={FIXED: inputs})
    running = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [port.type for port in running.get_inputs()] == ["tensor(int64)", "tensor(bool)", "tensor(float)"]
    assert {port.type for port in running.get_outputs()} == {"tensor(float)"}


def test_dynamic_sizes_in_half(tmp_path):
    """LayerNorm, attention and a resize by the signature's own dimensions."""
    wide = lively_small(channels=64)
    sizes = Size.parse_list("32,64")
    path = tmp_path / "wide.onnx"
    with quiet():
        convert(
            wide,
            wide.signature,
            sizes,
            path,
            precision="fp16",
            batch="dynamic",
            samples={size: pictures(size, 2) for size in sizes},
        )
    for size in (*sizes, Size.parse("40x48")):
        inputs = pictures(size, 3)
        with torch.no_grad():
            expected = wide(torch.from_numpy(inputs["image"])).numpy()
        assert np.abs(run(path, inputs) - expected).max() < 4e-2 * expected.std()
