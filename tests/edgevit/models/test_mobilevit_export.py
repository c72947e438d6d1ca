"""MobileViT's form for each runtime: the same function at every size, in the operations that were promised."""

from __future__ import annotations

import collections

import onnx
import pytest
import torch
from torch import nn

import converters
from converters.signature import Size
from edgevit.models import mobilevit
from edgevit.models.registry import create_model
from edgevit.samples import sample_inputs
from edgevit.sources import load_source


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """XXS with one transformer layer a stage; every norm does something, and no bias is zero."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mobilevit, "TRANSFORMER_DEPTHS", (1, 1, 1))
        model = create_model("mobilevit_xxs", 10)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(layer.weight, 0.7, 1.3)
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, std=0.1)
            nn.init.uniform_(layer.running_var, 0.7, 1.3)
        if getattr(layer, "bias", None) is not None:
            nn.init.normal_(layer.bias, std=0.3)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return model.double().eval()


@pytest.mark.parametrize("form", ["onnx", "tflite", "coreml"])
@pytest.mark.parametrize("size", [(64, 64), (160, 160), (224, 96), (32, 288)])
@pytest.mark.parametrize("batch", [1, 3])
def test_each_form_is_the_same_function(model, form, size, batch):
    """In float64, where nothing is rounded away; 160, 224 and 288 have odd maps. A batch of one goes its own way."""
    image = torch.rand(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(torch.cat((image, image)))[:batch]  # more than one, the way that training goes
        found = model.export_form(form)(image)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-10 * expected.std()


@pytest.mark.parametrize("form", ["tflite", "coreml"])
def test_a_single_picture_needs_four_dimensions(model, form):
    """More is where GPUs and the Neural Engine hand over to the CPU."""
    program = torch.export.export(model.export_form(form), (torch.rand(1, 3, 64, 96, dtype=torch.float64),))
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert max(value.dim() for value in values if isinstance(value, torch.Tensor)) == 4


def test_the_model_itself_is_not_changed(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.export_form("onnx")
    model.export_form("tflite")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_one_size_leaves_no_shape_arithmetic_in_onnx(tmp_path):
    """Dynamic in the batch, as files are by default."""
    source = load_source("mobilevit_xxs")
    [artifact] = converters.export(
        source.module,
        source.signature,
        name="xxs",
        out=tmp_path,
        formats=["onnx"],
        sizes=[Size.parse("64")],
        sample_inputs=sample_inputs(source),
    )
    counts = collections.Counter(node.op_type for node in onnx.load(artifact.path).graph.node)
    assert not counts.keys() & {"Shape", "Gather", "Cast", "Resize", "BatchNormalization"}
    assert counts["LayerNormalization"] == 21
