"""The first module that differs is named, in each format, however the file came to differ; a good file has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_models import lively_small, pictures
from tampering import replace_onnx_op, swap_onnx_channels, tamper_coreml, tamper_onnx, tamper_tflite
from torch import nn

from converters.bisect import DIFFERS, FOLLOWS, FUSED, SAME, bisect
from converters.errors import EdgeVitError
from converters.quiet import quiet
from converters.signature import Signature, Size, TensorSpec

SIZE = Size.parse("96")
PRECISION = {"onnx": "fp32", "tflite": "fp32", "coreml": "fp16"}


def found(path, small, precision="fp32", size=SIZE):
    return bisect(path, small, small.signature, pictures(size, 1), precision=precision, entry_point=size.entry_point)


@pytest.mark.parametrize("form", PRECISION)
def test_a_good_file_has_no_culprit(form, paths, small):
    result = found(paths[form], small, PRECISION[form])
    assert result.culprit is None
    assert "no module differs" in result.sentence
    verdicts = {step.module: step.verdict for step in result.steps}
    # BatchNorm is folded into the convolution before it, which has then no output of its own.
    assert (verdicts["stem"], verdicts["stem_norm"]) == (FUSED, SAME)
    assert all(step.verdict in (SAME, FUSED) for step in result.steps if step.op != "chunk")
    assert sum(step.verdict == SAME for step in result.steps) > 15


@pytest.mark.parametrize(
    ("initializer", "module"),
    [
        ("module.stem.weight", "stem"),
        ("module.depthwise.weight", "depthwise"),
        ("module.norm.weight", "norm"),
        ("module.qkv.bias", "qkv"),
        ("module.head.weight", "head"),
    ],
)
def test_a_changed_weight_in_onnx(initializer, module, paths, small, tmp_path):
    result = found(tamper_onnx(paths["onnx"], tmp_path / "x.onnx", initializer), small)
    assert result.culprit is not None
    assert result.culprit.module == module
    assert f"module '{module}'" in result.sentence
    assert "export_models.py:" in result.culprit.source
    verdicts = [step.verdict for step in result.steps]
    assert verdicts.count(DIFFERS) == 1
    assert verdicts[-1] in (DIFFERS, FOLLOWS)
    assert all(verdict in (SAME, FUSED, "not compared") for verdict in verdicts[: verdicts.index(DIFFERS)])


def test_channels_in_another_order_are_a_difference(paths, small, tmp_path):
    """The same numbers at other places: what their sorted ones alone could not tell."""
    path = swap_onnx_channels(paths["onnx"], tmp_path / "x.onnx", "module.stem")
    assert found(path, small).culprit.module == "stem"


def test_a_replaced_op_in_onnx(paths, small, tmp_path):
    """LogSoftmax in the place of Softmax: the file is valid, and wrong from there on."""
    result = found(replace_onnx_op(paths["onnx"], tmp_path / "x.onnx", "Softmax", "LogSoftmax"), small)
    assert result.culprit is not None
    assert (result.culprit.op, result.culprit.module) == ("softmax", "")


@pytest.mark.parametrize(
    ("layer", "shape", "module"),
    [
        ("depthwise", (1, 3, 3, 16), "depthwise"),
        ("qkv", (48, 16), "qkv"),
        ("head", (7, 16), "head"),
    ],
)
def test_a_changed_weight_in_tflite(layer, shape, module, paths, small, tmp_path):
    """In the second signature too, which shares its weights with the first."""
    path = tamper_tflite(paths["tflite"], tmp_path / "x.tflite", layer, shape)
    for size in (Size.parse("64"), SIZE):
        result = found(path, small, size=size)
        assert result.culprit is not None
        assert result.culprit.module == module


@pytest.mark.parametrize(
    ("constant", "module"),
    [("module_stem_weight_to_fp16", "stem"), ("module_qkv_weight_to_fp16", "qkv")],
)
def test_a_changed_weight_in_coreml(constant, module, paths, small, tmp_path):
    result = found(tamper_coreml(paths["coreml"], tmp_path / "x.mlpackage", constant), small, "fp16")
    assert result.culprit is not None
    assert result.culprit.module == module


class Gelus(nn.Module):
    """Two activations, of which coremltools 9.0 writes the second one wrongly."""

    signature = Signature((TensorSpec("x", ("batch", 32)),), (TensorSpec("y", ("batch", 32)),))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.exact = nn.GELU()
        self.second = nn.Linear(32, 32)
        self.approximate = nn.GELU(approximate="tanh")
        self.third = nn.Linear(32, 32)

    def forward(self, x):
        return self.third(self.approximate(self.second(self.exact(self.first(x)))))


def test_the_known_fault_of_coremltools_is_named(tmp_path):
    """coremltools 9.0 ignores gelu(approximate='tanh') from torch.export and writes the exact form."""
    with quiet():
        import coremltools as ct
    torch.manual_seed(0)
    module = Gelus().eval()
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 3
    with quiet():
        program = torch.export.export(module, (x,)).run_decompositions({})
        converted = ct.convert(
            program,
            convert_to="mlprogram",
            outputs=[ct.TensorType(name="y")],
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
        converted.save(str(tmp_path / "gelu.mlpackage"))
    result = bisect(tmp_path / "gelu.mlpackage", module, module.signature, {"x": x.numpy()}, precision="fp32")
    assert result.culprit is not None
    assert (result.culprit.module, result.culprit.op) == ("approximate", "gelu")


def test_a_layout_is_no_difference(paths, small):
    """TFLite computes in NHWC: its convolution's numbers are the module's in another order."""
    steps = {step.module: step for step in found(paths["tflite"], small).steps}
    assert steps["depthwise_norm"].verdict == SAME
    assert steps["depthwise_norm"].error < 1e-5


def test_a_weight_that_changes_nothing_is_no_fault(paths, small, tmp_path):
    assert found(tamper_onnx(paths["onnx"], tmp_path / "x.onnx", "module.stem.weight", 1.0), small).culprit is None


def test_an_untraceable_module_is_one_line(paths):
    class Untraceable(nn.Module):
        def forward(self, image):
            return image if float(image.sum()) > 0 else -image

    signature = Signature((TensorSpec("image", ("batch", 3, 96, 96)),), (TensorSpec("logits", ("batch", 3, 96, 96)),))
    with pytest.raises(EdgeVitError, match=r"cannot trace the module: .*, called at .*test_bisect\.py:\d+") as caught:
        bisect(paths["onnx"], Untraceable(), signature, {"image": np.zeros((1, 3, 96, 96), np.float32)})
    assert "\n" not in str(caught.value)


def test_another_module_differs_from_the_first_layer_on(paths):
    torch.manual_seed(1)
    other = lively_small()
    with torch.no_grad():
        other.stem.weight.mul_(-1.0)
    assert found(paths["onnx"], other).culprit.module == "stem"
