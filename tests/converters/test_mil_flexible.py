"""Packages that take several shapes, and pictures as Core ML knows them: coremltools' files against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from converters import coreml
from converters.errors import EdgeVitError
from converters.mil import Program
from converters.run import load


class Net(nn.Module):
    """(1, 3, H, W) → the picture's own features (1, 4, H, W) and what is left of them all (1, 5)."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.conv(x))
        return y, self.head(y.mean((2, 3)))


def convert(module: nn.Module, shape: Any, path: Path, *, free: bool, outputs: Any = None, **image: Any) -> Path:
    """`shape` is coremltools' own, or a list for an image input with `image`; `free` leaves height and width open."""
    channels = next(module.parameters()).shape[1]
    sizes = {2: Dim("height", min=8, max=32), 3: Dim("width", min=8, max=32)}
    example = torch.zeros(1, channels, 12, 16)
    traced = torch.export.export(module.eval(), (example,), dynamic_shapes={"x": sizes} if free else None)
    kind = ct.ImageType("x", shape, **image) if image else ct.TensorType("x", shape, dtype=np.float32)
    model = ct.convert(
        traced.run_decompositions({}),
        inputs=[kind],
        outputs=outputs or [ct.TensorType("map", dtype=np.float32), ct.TensorType("scores", dtype=np.float32)],
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


SIZES = ((12, 16), (8, 8), (32, 20))
ENUMERATED = ct.EnumeratedShapes([(1, 3, *size) for size in SIZES], default=(1, 3, 12, 16))
RANGE = ct.Shape((1, 3, ct.RangeDim(8, 32, default=12), ct.RangeDim(8, 32, default=16)))


def assert_same(found: dict[str, np.ndarray], module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = module(x)
    for array, tensor in zip(found.values(), expected, strict=True):
        assert array.shape == tensor.shape
        np.testing.assert_allclose(array, tensor.numpy(), atol=1e-4 * float(tensor.std()))


@pytest.fixture(scope="module")
def module() -> Net:
    return Net().eval()


@pytest.fixture(scope="module")
def enumerated(module, tmp_path_factory) -> Path:
    return convert(module, ENUMERATED, tmp_path_factory.mktemp("shapes") / "enumerated.mlpackage", free=True)


@pytest.fixture(scope="module")
def ranged(module, tmp_path_factory) -> Path:
    return convert(module, RANGE, tmp_path_factory.mktemp("shapes") / "ranged.mlpackage", free=True)


@pytest.mark.parametrize("kind", ["enumerated", "ranged"])
def test_every_allowed_shape_runs(kind, module, request):
    program = Program(request.getfixturevalue(kind))
    assert str(program.inputs()["x"]) == "float32 (1, 3, ?, ?)"
    for size in (*SIZES, *([(9, 31), (32, 32)] if kind == "ranged" else [])):
        x = torch.randn(1, 3, *size)
        assert_same(program.run({"x": x.numpy()}), module, x)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("enumerated", (1, 3, 8, 16), r"takes \(1, 3, 12, 16\) or \(1, 3, 8, 8\) or \(1, 3, 32, 20\)"),
        ("ranged", (1, 3, 7, 16), "takes 1…1 × 3…3 × 8…32 × 8…32"),
        ("ranged", (1, 3, 8, 33), "takes 1…1 × 3…3 × 8…32 × 8…32"),
        ("ranged", (2, 3, 8, 8), r"declares float32 \(1, 3, \?, \?\)"),
    ],
)
def test_a_shape_outside_is_one_line(kind, shape, message, request):
    with pytest.raises(EdgeVitError, match=message) as error:
        Program(request.getfixturevalue(kind)).run({"x": np.zeros(shape, np.float32)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["enumerated", "ranged"])
def test_what_is_free_is_shown_as_free(kind, module, request):
    path = request.getfixturevalue(kind)
    program = Program(path)
    assert coreml.describe(path)["main"][0] == program.inputs()
    session = load(path)
    assert [port.shape for port in session.inputs] == [(1, 3, None, None)]
    assert {port.name: port.shape for port in session.outputs} == {
        name: item.shape for name, item in program.outputs().items()
    }
    x = torch.randn(1, 3, 32, 20)
    assert_same(session.run({"x": x.numpy()}), module, x)


IMAGES = {
    "enumerated": ct.EnumeratedShapes([(1, 3, *size) for size in SIZES], default=(1, 3, 12, 16)),
    "ranged": RANGE,
}


@pytest.mark.parametrize("kind", IMAGES)
def test_pictures_of_several_sizes(kind, module, tmp_path):
    path = convert(module, IMAGES[kind], tmp_path / "m.mlpackage", free=True, scale=1 / 50, bias=[-1, -2, -0.5])
    program = Program(path)
    assert str(program.inputs()["x"]) == "uint8 (1, ?, ?, 3)"
    assert coreml.describe(path)["main"][0] == program.inputs()
    for size in SIZES:
        picture = np.random.default_rng(0).integers(0, 256, (1, *size, 3), np.uint8)
        x = torch.from_numpy(picture).permute(0, 3, 1, 2) / 50 - torch.tensor([1, 2, 0.5]).reshape(3, 1, 1)
        assert_same(program.run({"x": picture}), module, x)
    with pytest.raises(EdgeVitError, match="takes ") as error:
        program.run({"x": np.zeros((1, 40, 16, 3), np.uint8)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["RGB", "BGR", "G"])
def test_pictures_with_bias_and_scale_in_each_layout(layout, tmp_path):
    """The bias and the model's channels are in the order of the layout; what is given to `run` is always RGB."""
    channels = 1 if layout == "G" else 3
    module = Net(channels).eval()
    bias = [-1.0, -2.0, -0.5][:channels]
    how = {
        "scale": 1 / 50,
        "bias": bias[0] if layout == "G" else bias,
        "color_layout": getattr(ct.colorlayout, {"G": "GRAYSCALE"}.get(layout, layout)),
    }
    path = convert(module, (1, channels, 12, 16), tmp_path / "m.mlpackage", free=False, **how)
    picture = np.random.default_rng(0).integers(0, 256, (1, 12, 16, channels), np.uint8)
    program = Program(path)
    assert str(program.inputs()["x"]) == f"uint8 (1, 12, 16, {channels})"
    assert coreml.describe(path)["main"] == (program.inputs(), program.outputs())
    x = torch.from_numpy(picture).permute(0, 3, 1, 2)
    x = (x.flip(1) if layout == "BGR" else x) / 50 + torch.tensor(bias).reshape(-1, 1, 1)
    assert_same(program.run({"x": picture}), module, x)


class Painter(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return 128 + 200 * torch.tanh(self.conv(x))


@pytest.mark.parametrize("layout", ["RGB", "BGR", "GRAYSCALE"])
def test_pictures_come_out(layout, tmp_path):
    """As uint8 (N, H, W, C), RGB: rounded, and cut off at 0 and 255."""
    module = Painter(1 if layout == "GRAYSCALE" else 3).eval()
    outputs = [ct.ImageType("picture", color_layout=getattr(ct.colorlayout, layout))]
    path = convert(module, (1, 3, 12, 16), tmp_path / "m.mlpackage", free=False, outputs=outputs)
    program, x = Program(path), torch.randn(1, 3, 12, 16)
    found = program.run({"x": x.numpy()})["picture"]
    assert coreml.describe(path)["main"][1] == program.outputs()
    with torch.no_grad():
        expected = module(x).permute(0, 2, 3, 1)
    expected = expected.flip(-1) if layout == "BGR" else expected
    assert expected.min() < 0
    assert expected.max() > 255
    assert (found.dtype, found.shape) == (np.uint8, tuple(expected.shape))
    assert abs(found - expected.clamp(0, 255).numpy()).max() < 0.501
