"""ONNX files of any module: what is inside, what is left out, and what is refused; run by ONNX Runtime itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_models import lively_small, pictures
from foreign_models import Attention, Blocks, OneBatch, OneHeight, Ports, square_signature

from converters.errors import EdgeVitError
from converters.onnx import convert
from converters.quiet import quiet
from converters.signature import Signature, Size
from converters.unsupported import refuse_large

FIXED = (Size(()),)


def converted(module, signature, sizes, folder, **options):
    """The path of a converted file; fp32, dynamic batch."""
    path = folder / "model.onnx"
    with quiet():
        convert(
            module.eval(),
            signature,
            sizes,
            path,
            **({"precision": "fp32", "batch": "dynamic", "samples": {}} | options),
        )
    return path


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def types(path):
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_names_of_a_strangers_ports(tmp_path):
    """A dict in another order than the signature, an output that is an input, one that is returned twice."""
    torch.manual_seed(0)
    module = Ports()
    running = session(converted(module, module.signature, FIXED, tmp_path))
    assert [(port.name, port.type) for port in running.get_inputs()] == [
        ("tokens", "tensor(int64)"),
        ("keep", "tensor(bool)"),
        ("x", "tensor(float)"),
    ]
    assert [port.name for port in running.get_outputs()] == ["zeta", "same", "alpha", "again"]
    arrays = {
        "tokens": np.array([[1, 9, 4]] * 3),
        "keep": np.array([[True, False, True]] * 3),
        "x": np.random.default_rng(0).normal(size=(3, 3, 4)).astype(np.float32),
    }
    with torch.no_grad():
        expected = module(*(torch.from_numpy(array) for array in arrays.values()))
    found = dict(zip(expected, running.run(list(expected), arrays), strict=True))
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("batch", ["dynamic", 1])
def test_one_size_leaves_no_arithmetic_on_shapes(batch, tmp_path):
    torch.manual_seed(0)
    module = Attention()
    path = converted(module, module.signature, FIXED, tmp_path, batch=batch)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert not {"Shape", "Gather", "Cast", "Expand", "ConstantOfShape"} & set(types(path))
    image = torch.randn(3 if batch == "dynamic" else 1, 3, 16, 16)
    with torch.no_grad():
        expected = module(image).numpy()
    np.testing.assert_allclose(session(path).run(None, {"image": image.numpy()})[0], expected, rtol=1e-4, atol=1e-5)


def test_several_sizes_are_dynamic_by_name(small, tmp_path):
    path = converted(small, small.signature, Size.parse_list("32,64"), tmp_path)
    graph = onnx.load(path).graph
    assert [dim.dim_param or dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim] == [
        "batch",
        3,
        "height",
        "width",
    ]
    assert [dim.dim_param or dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim] == ["batch", 7]


def test_debug_info_keeps_where_each_node_comes_from(small, tmp_path):
    lean = converted(small, small.signature, Size.parse_list("32"), tmp_path).read_bytes()
    full = converted(small, small.signature, Size.parse_list("32"), tmp_path, debug_info=True).read_bytes()
    assert b"export_models.py" in full
    assert b"stem_norm" in full
    assert b"export_models.py" not in lean
    assert b"pkg.torch" not in lean
    assert len(lean) < 0.9 * len(full)


def test_a_baked_batch_is_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(EdgeVitError, match=r"^the module works for a single batch only.*--batch 1$"):
        converted(OneBatch(), square_signature(4, 4), FIXED, tmp_path)
    assert not list(tmp_path.iterdir())
    path = converted(OneBatch(), square_signature(4, 4), FIXED, tmp_path, batch=1)
    assert session(path).get_inputs()[0].shape == [1, 4, 4]


def test_a_baked_height_is_one_line_that_says_what_to_do(tmp_path):
    sizes = tuple(Size((("height", height),)) for height in (8, 16))
    with pytest.raises(EdgeVitError, match=r"single height only.*--static"):
        converted(OneHeight(), OneHeight.signature, sizes, tmp_path)
    assert session(converted(OneHeight(), OneHeight.signature, sizes[1:], tmp_path)).get_inputs()[0].shape[2] == 16


def test_weights_beyond_what_a_file_holds_are_refused_before_any_work():
    with pytest.raises(EdgeVitError, match=r"onnx: weights of 3\.7 GiB"):
        refuse_large(torch.nn.Linear(31_622, 31_622, device="meta"), "onnx")


def test_weights_lie_inside_the_file(tmp_path):
    path = converted(Blocks(torch.nn.Linear(4, 300_000)), square_signature(4, 300_000), FIXED, tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["model.onnx"]
    assert path.stat().st_size > 4 * 4 * 300_000


def test_pictures_as_bytes_at_both_batches(tmp_path):
    from converters.artifact import Preprocessing
    from converters.picture import PictureInput

    picture = PictureInput(lively_small(), Preprocessing(mean=(0.1, 0.2, 0.3)), Signature.image_classifier(7))
    path = converted(picture, picture.signature, Size.parse_list("32"), tmp_path)
    running = session(path)
    assert [(port.name, port.type, port.shape) for port in running.get_inputs()] == [
        ("image", "tensor(uint8)", ["batch", 32, 32, 3])
    ]
    image = (255 * np.clip(pictures(Size.parse("32"), 3)["image"], 0, 1)).astype(np.uint8).transpose(0, 2, 3, 1)
    (found,) = running.run(["probabilities"], {"image": image})
    with torch.no_grad():
        (expected,) = picture(torch.from_numpy(image.copy()))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert types(path)["Cast"] == 1  # the bytes themselves
