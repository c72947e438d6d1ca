"""MobileViT as a program: parameters, shapes, and what torch.export and ONNX Runtime make of it."""

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F

from converters.errors import EdgeVitError
from edgevit.models import mobilevit
from edgevit.models.mobilevit import fold, unfold
from edgevit.models.registry import create_model, list_models

DYNAMIC = {
    "image": {
        0: torch.export.Dim("batch"),
        2: 32 * torch.export.Dim("rows", min=1, max=64),
        3: 32 * torch.export.Dim("columns", min=1, max=64),
    }
}


@pytest.fixture(scope="module")
def model():
    """XXS with one transformer layer a stage instead of 2, 4 and 3: the same program, exported in half the time."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mobilevit, "TRANSFORMER_DEPTHS", (1, 1, 1))
        return create_model("mobilevit_xxs", 10).eval()


@pytest.fixture(scope="module")
def dynamic_program(model) -> torch.export.ExportedProgram:
    """Traced, as torch.onnx.export does it, where the last map is even (4 × 6) and nothing is resized."""
    # This setting: that a dimension may be 1 is no reason for a guard.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        return torch.export.export(model, (torch.rand(2, 3, 128, 192),), dynamic_shapes=DYNAMIC)


def count(program: torch.export.ExportedProgram, name: str) -> int:
    return sum(name in str(node.target) for node in program.graph.nodes)


def largest_rank(program: torch.export.ExportedProgram) -> int:
    values = [node.meta.get("val") for node in program.graph.nodes]
    return max(value.dim() for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(("name", "millions"), [("mobilevit_xxs", 1.3), ("mobilevit_xs", 2.3), ("mobilevit_s", 5.6)])
def test_parameters_are_the_papers_and_timms(name, millions):
    with torch.device("meta"):
        ours, theirs = create_model(name), timm.create_model(name)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(parameters / 1e6, 1) == millions


def test_registry():
    assert list_models() == ["mobilevit_xxs", "mobilevit_xs", "mobilevit_s"]
    assert create_model("mobilevit_xxs", num_classes=7).classifier.out_features == 7
    assert create_model("mobilevit_xxs", dropout=0.0).dropout.p == 0.0
    with pytest.raises(EdgeVitError, match=r"unknown model 'mobilvit_xs'; did you mean .*mobilevit_xs"):
        create_model("mobilvit_xs")
    with pytest.raises(EdgeVitError, match="there are mobilevit_xxs"):
        create_model("resnet50")
    with pytest.raises(EdgeVitError, match="at least 1"):
        create_model("mobilevit_xxs", num_classes=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_are_ordered_as_in_the_paper(batch):
    """Each sequence holds the pixels at one place of all patches of one image; `fold` undoes it."""
    dim, rows, columns = 3, 4, 5
    features = torch.randn(batch, dim, 2 * rows, 2 * columns)
    sequences = unfold(features, rows, columns).reshape(4, batch, rows * columns, dim)
    for place in range(4):
        expected = features[:, :, place // 2 :: 2, place % 2 :: 2].flatten(2).transpose(1, 2)
        assert torch.equal(sequences[place], expected)
    assert torch.equal(fold(sequences.flatten(0, 2), batch, rows, columns), features)


def test_a_bilinear_resize_to_the_same_size_changes_nothing():
    """What a dynamic program does at sizes where the reference does not resize."""
    x = torch.randn(2, 3, 8, 10)
    assert torch.equal(F.interpolate(x, size=(8, 10), mode="bilinear", align_corners=False), x)


@torch.no_grad()
def test_images_of_a_batch_do_not_mix(model):
    images = torch.rand(3, 3, 64, 96)
    assert torch.allclose(model(images), torch.cat([model(image[None]) for image in images]), atol=1e-6)


def test_every_parameter_learns():
    model = create_model("mobilevit_xxs", 10)
    model(torch.rand(4, 3, 96, 96).contiguous(memory_format=torch.channels_last)).square().sum().backward()
    # A key's bias adds the same to all scores of a query, which softmax ignores: it has no gradient by construction.
    still = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().max() > 1e-9]
    assert all(name.endswith("attention.key.bias") for name in still)


@pytest.mark.parametrize(("side", "resizes"), [(64, 0), (96, 2)])
def test_a_static_program_is_lean(model, side, resizes):
    """Only an odd map (96 / 32 = 3) is resized, there and back; no tensor has more than 5 dimensions."""
    program = torch.export.export(model, (torch.rand(1, 3, side, side),)).run_decompositions({})
    assert count(program, "upsample") == resizes
    assert largest_rank(program) <= 5
    assert count(program, "layer_norm") == 2 * 3 + 3  # whole, as runtimes have it


@torch.no_grad()
def test_a_dynamic_program_bakes_no_size_in(model, dynamic_program):
    """Run where the last map is even, odd, higher than wide."""
    assert largest_rank(dynamic_program) <= 5
    module = dynamic_program.module()
    for shape in ((1, 128, 96), (3, 96, 128), (1, 224, 160), (3, 192, 320), (2, 256, 256)):
        image = torch.rand(shape[0], 3, *shape[1:])
        assert torch.allclose(module(image), model(image), atol=1e-6)


@torch.no_grad()
def test_one_onnx_file_serves_every_size(model, dynamic_program, tmp_path):
    """From 32, whose last map is a single pixel, to 320: one file, traced at one size, in another runtime."""
    names = {"input_names": ["image"], "output_names": ["logits"]}
    torch.onnx.export(dynamic_program, f=tmp_path / "model.onnx", dynamo=True, opset_version=18, verbose=False, **names)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    sizes = ((32, 32), (64, 64), (96, 96), (160, 160), (192, 192), (224, 224), (256, 256), (288, 288), (320, 320))
    for height, width in (*sizes, (32, 64), (192, 320)):
        for batch in (1, 3) if height < 200 else (1,):
            image = torch.rand(batch, 3, height, width)
            expected = model(image).numpy()
            (logits,) = session.run(None, {"image": image.numpy()})
            assert expected.std() > 1e-2
            assert np.abs(logits - expected).max() < 1e-4 * expected.std(), (batch, height, width)
