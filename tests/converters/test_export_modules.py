"""Modules of other kinds than picture classifiers: fixed shapes, several inputs and outputs, no batch dimension."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_models import pictures
from torch import nn

import converters
from converters.errors import EdgeVitError, ParityError
from converters.flops import count_flops
from converters.run import load
from converters.signature import Signature, Size, TensorSpec

FIXED = Size(())


class Two(nn.Module):
    """Integers and floats in; floats and integers out, by names that are not in alphabetical order."""

    signature = Signature(
        (TensorSpec("tokens", ("batch", 5), "int64", "tokens"), TensorSpec("values", ("batch", 5, 8))),
        (TensorSpec("sums", ("batch", 8)), TensorSpec("best", ("batch", 5), "int64")),
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens, values):
        x = self.mix(self.embedding(tokens) + values)
        return {"sums": x.sum(dim=1), "best": x.argmax(dim=-1)}


def two_inputs(size: Size, count: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        "tokens": generator.integers(0, 11, (count, 5)),
        "values": generator.normal(size=(count, 5, 8)).astype(np.float32),
    }


class Unbatched(nn.Module):
    """A matrix in, a matrix out."""

    signature = Signature((TensorSpec("matrix", (6, 4)),), (TensorSpec("product", (6, 6)),))

    def forward(self, matrix):
        return matrix @ matrix.T


def matrices(size: Size, count: int) -> dict[str, np.ndarray]:
    return {"matrix": np.random.default_rng(2).normal(size=(count, 6, 4)).astype(np.float32)}


@pytest.mark.parametrize("form", ["onnx", "tflite", "coreml"])
def test_several_inputs_and_outputs_by_the_signatures_names(form, tmp_path):
    module = Two().eval()
    [artifact] = converters.export(
        module, module.signature, name="two", out=tmp_path, formats=[form], precision="fp32", sample_inputs=two_inputs
    )
    session = load(artifact.path)
    assert [port.name for port in session.inputs] == ["tokens", "values"]
    inputs = {key: array[:1] for key, array in two_inputs(FIXED, 1).items()}
    expected = module(*(torch.from_numpy(array) for array in inputs.values()))
    found = session.run(inputs)
    np.testing.assert_allclose(found["sums"], expected["sums"].detach().numpy(), atol=1e-5)
    np.testing.assert_array_equal(found["best"], expected["best"].numpy())
    assert artifact.metadata.sizes == ("fixed",)


@pytest.mark.parametrize("form", ["onnx", "tflite", "coreml"])
def test_a_module_without_a_batch_dimension(form, tmp_path):
    module = Unbatched()
    [artifact] = converters.export(
        module, module.signature, name="u", out=tmp_path, formats=[form], precision="fp32", sample_inputs=matrices
    )
    matrix = matrices(FIXED, 1)["matrix"][0]
    np.testing.assert_allclose(load(artifact.path).run({"matrix": matrix})["product"], matrix @ matrix.T, atol=1e-5)
    assert artifact.metadata.batch == 1
    assert artifact.metadata.golden.inputs["matrix"].shape == (6, 4)


class OneAtATime(nn.Module):
    """Right for one picture only: what it does with more mixes them."""

    def forward(self, image):
        return image.mean(dim=(0, 2, 3), keepdim=True)[:, :, 0, 0]


def test_batch_1_is_what_a_module_gets_that_knows_no_other(tmp_path):
    signature = Signature.image_classifier(3, multiple_of=8)
    options = {"name": "one", "formats": ["onnx"], "sizes": [Size.parse("16")], "sample_inputs": pictures}
    [artifact] = converters.export(OneAtATime(), signature, out=tmp_path, batch=1, **options)
    picture = pictures(Size.parse("16"), 2)["image"][1:]
    found = load(artifact.path).run({"image": picture})["logits"]
    np.testing.assert_allclose(found, picture.mean(axis=(2, 3)), atol=1e-5)


def test_what_the_module_itself_cannot_take_is_one_line(small, tmp_path):
    signature = Signature((TensorSpec("image", ("batch", 4, 16, 16), "float32", "image"),), small.signature.outputs)
    with pytest.raises(EdgeVitError, match=r"^the module itself fails at size fixed: [^\n]*4 channels[^\n]*$"):
        converters.export(
            small,
            signature,
            name="small",
            out=tmp_path,
            sample_inputs=lambda size, count: {"image": np.ones((count, 4, 16, 16), np.float32)},
        )
    with pytest.raises(EdgeVitError, match=r"export takes a torch\.nn\.Module, not a str"):
        converters.export("small", signature, name="small", out=tmp_path, sample_inputs=pictures)


def test_a_failed_file_is_kept_on_request(small, tmp_path, monkeypatch):
    monkeypatch.setattr("converters.parity.TOLERANCE", {"fp32": 0.0})
    options = {"name": "small", "formats": ["onnx"], "sizes": [Size.parse("16")], "sample_inputs": pictures}
    with pytest.raises(ParityError, match=r"is off by .*; kept as .*small\.onnx\.unverified"):
        converters.export(small, small.signature, out=tmp_path, keep_failed=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx.unverified"]
    with pytest.raises(ParityError, match=r"is off by [^;]*; fp32 allows 0$"):
        converters.export(small, small.signature, out=tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx.unverified"]


class TokenHandedOn(nn.Module):
    """A parameter is an argument of a submodule, as class tokens are in some of timm's models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(1, 8))
        self.mix = nn.Bilinear(8, 8, 3)

    def forward(self, values):
        return self.mix(values, self.token.expand_as(values)) + nn.Identity()(self.token).sum()


def test_operations_are_counted_where_a_parameter_is_handed_on():
    module = TokenHandedOn()
    module.mix.register_module("inner", nn.Identity())
    wrapped = nn.Sequential(nn.Linear(8, 8), module)
    assert count_flops(wrapped, (torch.rand(2, 8),)) >= 2 * 2 * 8 * 8
    assert all(parameter.requires_grad for parameter in wrapped.parameters())
