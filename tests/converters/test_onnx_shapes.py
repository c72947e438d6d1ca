"""What an ONNX file says of its intermediate values: without it ONNX Runtime cannot plan memory for symbolic sizes."""

import onnx
import pytest
from export_models import lively_small

from converters.onnx import convert
from converters.signature import Size


@pytest.fixture(scope="module")
def small():
    return lively_small()


def shapes(module, path, sizes, batch):
    convert(module, module.signature, Size.parse_list(sizes), path, precision="fp32", batch=batch, samples={})
    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    computed = {name for node in graph.node for name in node.output} - {value.name for value in graph.output}
    known = {
        info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in graph.value_info
    }
    assert not known.keys() & weights
    return known, computed


def test_symbolic_shapes_are_kept_through_every_operation(small, tmp_path):
    known, computed = shapes(small, tmp_path / "dynamic.onnx", "64", "dynamic")
    assert computed <= known.keys()
    assert any("batch" in str(shape[0]) for shape in known.values())


def test_fixed_shapes_are_left_to_the_runtime(small, tmp_path):
    known, _ = shapes(small, tmp_path / "fixed.onnx", "64", 1)
    assert not known
