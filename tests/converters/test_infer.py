"""What is found by running a module, against what its author knows; and that an inferred signature can be exported."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

import converters
from converters.errors import EdgeVitError
from converters.infer import infer_signature
from converters.run import load
from converters.signature import Dim, Signature, Size, TensorSpec
from converters.wrap import flat_outputs, named_outputs


class Pictures(nn.Module):
    """A convolutional classifier whose pictures must be multiples of `step`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, picture):
        if picture.shape[2] % self.step or picture.shape[3] % self.step:
            raise ValueError("wrong side")
        return self.head(self.conv(picture).relu().mean((2, 3)))


@pytest.mark.parametrize(
    ("step", "side", "found"),
    [(32, 64, 32), (16, 48, 16), (14, 42, 14), (1, 64, 32), (1, 33, 1)],
)
def test_the_sizes_of_pictures_are_found_by_running(step, side, found):
    signature = infer_signature(Pictures(step), torch.rand(1, 3, side, side))
    assert signature == Signature(
        (TensorSpec("picture", ("batch", 3, "height", "width"), "float32", "image"),),
        (TensorSpec("logits", ("batch", 5), "float32", "logits"),),
        tuple(Dim(name, minimum=found, multiple_of=found) for name in ("height", "width")),
    )


def test_a_size_that_cannot_change_keeps_its_name():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=1)
    signature = infer_signature(vit, torch.rand(2, 3, 48, 48))
    assert signature.dims == (Dim("height", 48, 48), Dim("width", 48, 48))
    signature.check(Size.parse("48"))
    with pytest.raises(EdgeVitError, match=r"height must be 48$"):
        signature.check(Size.parse("64"))


class Patches(nn.Module):
    """Takes any size, but answers with a map of its own, one value for each patch of 16."""

    def forward(self, image):
        return nn.functional.avg_pool2d(image, 16)


class SameSize(nn.Module):
    def forward(self, image):
        return {"sharp": image * 2, "mean": image.mean((1, 2, 3))}


def test_outputs_follow_the_picture_or_its_size_is_fixed():
    assert infer_signature(Patches(), torch.rand(1, 3, 64, 64)).dims[0] == Dim("height", 64, 64)
    # 60 × 60 and 64 × 64 give the same map of patches: no step of four pixels is a change of size.
    assert infer_signature(Patches(), torch.rand(1, 3, 60, 60)).dims[0] == Dim("height", 60, 60)
    signature = infer_signature(SameSize(), torch.rand(1, 3, 64, 64))
    assert [spec.shape for spec in signature.outputs] == [("batch", 3, "height", "width"), ("batch",)]
    assert signature.dims[0] == Dim("height", 32, None, 32)
    assert infer_signature(SameSize(), torch.rand(1, 3, 64, 64), dynamic=False).dims[0] == Dim("height", 64, 64)


class Text(nn.Module):
    def __init__(self, positions: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(positions, 8)

    def forward(self, tokens, padding, scale=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return {"logits": x, "extra": {"hidden": (x.sum(1), None, [x[:, 0]])}, "best": x.argmax(-1), "seen": ~padding}


def test_tokens_masks_and_nested_outputs():
    inputs = {"padding": torch.zeros(2, 6, dtype=torch.bool), "tokens": torch.arange(12).reshape(2, 6) % 10}
    signature = infer_signature(Text(8), inputs, meanings={"best": "tokens"})
    assert signature == Signature(
        (
            TensorSpec("tokens", ("batch", "tokens"), "int64", "tokens"),
            TensorSpec("padding", ("batch", "tokens"), "bool", "mask"),
        ),
        (
            TensorSpec("logits", ("batch", "tokens", 8), "float32", "logits"),
            TensorSpec("extra_hidden_0", ("batch", 8)),
            TensorSpec("extra_hidden_2_0", ("batch", 8)),
            TensorSpec("best", ("batch", "tokens"), "int64", "tokens"),
            TensorSpec("seen", ("batch", "tokens"), "bool", "mask"),
        ),
        (Dim("tokens", 1, 6),),  # 12 tokens are more than it has positions for
    )
    assert infer_signature(Text(12), inputs).dims == (Dim("tokens", 1, None),)
    assert infer_signature(Text(8), inputs, dynamic=False).inputs[0].shape == ("batch", 6)


class Mixed(nn.Module):
    """Examples of a batch are not independent: a dimension that only looks like a batch."""

    def forward(self, x):
        return x - x.mean(0)


class Matrix(nn.Module):
    def forward(self, a, b):
        return a @ b, a.sum()


def test_what_only_looks_like_a_batch_is_none():
    assert infer_signature(Mixed(), torch.rand(2, 3)).inputs[0].shape == (2, 3)
    signature = infer_signature(Matrix(), (torch.rand(3, 4), torch.rand(4, 3)))
    assert [spec.shape for spec in (*signature.inputs, *signature.outputs)] == [(3, 4), (4, 3), (3, 3), ()]
    assert [spec.name for spec in signature.outputs] == ["output_0", "output_1"]


@pytest.mark.parametrize("form", ["onnx", "tflite", "coreml"])
def test_nested_outputs_are_exported_under_their_names(form, tmp_path):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            y = self.linear(x)
            return {"first": y, "more": (y * x[:, :1], None)}

    module = Nested()
    signature = infer_signature(module, torch.rand(1, 4))
    assert [spec.name for spec in signature.outputs] == ["first", "more_0"]
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    [artifact] = converters.export(
        module,
        signature,
        name="nested",
        out=tmp_path,
        formats=[form],
        precision="fp32",
        sample_inputs=lambda size, count: {"x": x[:count]},
    )
    found = load(artifact.path).run({"x": x[:1]})
    expected = x[:1] @ module.linear.weight.detach().numpy().T + module.linear.bias.detach().numpy()
    np.testing.assert_allclose(found["first"], expected, atol=1e-5)
    np.testing.assert_allclose(found["more_0"], expected * x[:1, :1], atol=1e-5)


def test_names_of_outputs():
    a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert flat_outputs(a) == {"output": a}
    assert flat_outputs([a, {"x": b}, (c,)]) == {"output_0": a, "output_1_x": b, "output_2_0": c}
    assert named_outputs((a, [b, None]), ("one", "two")) == {"one": a, "two": b}
    with pytest.raises(EdgeVitError, match="returns no output 'z'; it returns x"):
        named_outputs({"x": a}, ("z",))


class Selecting(nn.Module):
    """Nothing is above the threshold."""

    def forward(self, x):
        return x[:, x[0] > 2]


def test_an_output_may_be_empty():
    assert infer_signature(Selecting(), torch.rand(2, 3)).outputs[0].shape == ("batch", 0)


class Wrong(nn.Module):
    def forward(self, x, y=None):
        return "text" if y is None else x @ y


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


class Shortened(nn.Module):
    def forward(self, x):
        return x.bfloat16()


@pytest.mark.parametrize(
    ("module", "inputs", "options", "message"),
    [
        (len, torch.rand(1), {}, "a torch.nn.Module is needed, not a builtin_function_or_method"),
        (Wrong(), torch.rand(1), {}, "returns no tensor"),
        (Wrong(), (torch.rand(2, 3), torch.rand(2, 3)), {}, "the module fails on the example inputs: "),
        (Spectrum(), torch.rand(1, 4), {}, "'output' is complex, which no format has"),
        (
            nn.Linear(4, 2).bfloat16(),
            torch.rand(1, 4),
            {},
            "the module holds 'weight' in bfloat16; call .float() on it",
        ),
        (nn.BatchNorm1d(4).half(), torch.rand(1, 4), {}, "the module holds 'weight' in float16; call .float() on it"),
        (nn.Identity(), torch.rand(1, 4).half(), {}, "inputs hold 'input' in float16; call .float() on it"),
        (Shortened(), torch.rand(1, 4), {}, "the module returns 'output' in bfloat16; call .float() on it"),
        (Wrong(), (torch.rand(1),) * 3, {}, "3 example inputs, but forward takes 2"),
        (Wrong(), (), {}, "at least one example input"),
        (Wrong(), ([1, 2],), {}, "example input 'x' must be a tensor, not a list"),
        (Wrong(), 5, {}, "example inputs are tensors, in a tuple or a dict, not a int"),
        (Wrong(), {"y": torch.rand(1)}, {}, "the example inputs are y, forward's first arguments are x;"),
        (
            nn.Identity(),
            torch.rand(1, 2),
            {"meanings": {"z": "image"}},
            "no input or output 'z'; there are input, output",
        ),
        (nn.Identity(), torch.rand(1, 2), {"meanings": {"input": "cat"}}, "meaning 'cat' of input: choose from image"),
    ],
)
def test_what_cannot_be_meant_is_one_line(module, inputs, options, message):
    with pytest.raises(EdgeVitError) as caught:
        infer_signature(module, inputs, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
