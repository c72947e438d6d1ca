"""Whole converted programs: what the Core ML evaluator computes, against the torch module that was converted."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

from converters.mil import Program

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # of the output's standard deviation
PRECISIONS = {"fp32": ct.precision.FLOAT32, "fp16": ct.precision.FLOAT16}


def scaled(module: nn.Module, size: int) -> nn.Module:
    """Random normalisation statistics, and a last layer whose outputs have a standard deviation near 1.

    With default initialisation activations fade layer by layer, and any wrong program "agrees".
    """
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.2)
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
    module.eval()
    last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight /= module(torch.randn(8, 3, size, size)).std()
        last.bias.normal_(0, 0.5)
    return module


def export(module: nn.Module, size: int) -> torch.export.ExportedProgram:
    return torch.export.export(module, (torch.randn(1, 3, size, size),)).run_decompositions({})


def convert(exported: torch.export.ExportedProgram, path: Path, precision: str, target=ct.target.iOS16) -> Path:
    (image,) = exported.example_inputs[0]
    model = ct.convert(
        exported,
        convert_to="mlprogram",
        inputs=[ct.TensorType("image", image.shape, dtype=np.float32)],
        outputs=[ct.TensorType("logits", dtype=np.float32)],
        minimum_deployment_target=target,
        compute_precision=PRECISIONS[precision],
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def assert_agrees(program: Program, module: nn.Module, size: int, precision: str, function: str | None = None) -> None:
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        expected = module(images).numpy()
    found = np.concatenate([program.run({"image": image[None].numpy()}, function)["logits"] for image in images])
    assert expected.std() > 0.3, "outputs that hardly vary prove nothing"
    error = abs(found - expected).max() / expected.std()
    print(
        f"{program.path.stem} {function or ''} at {size}, {precision}: max |difference| / std = {error:.1e}"
    )  # with -s
    assert error < TOLERANCE[precision]


@pytest.fixture(scope="module")
def mobilevit() -> nn.Module:
    return scaled(timm.create_model("mobilevit_xxs", num_classes=10), 64)


@pytest.fixture(scope="module")
def exported(mobilevit) -> dict[int, torch.export.ExportedProgram]:
    """At 96 the last map is 3 × 3: it is resized to 4 × 4 for its patches and back."""
    return {size: export(mobilevit, size) for size in (64, 96)}


def test_mobilevit_in_single_precision_at_a_size_with_odd_maps(mobilevit, exported, tmp_path):
    program = Program(convert(exported[96], tmp_path / "mobilevit_xxs.mlpackage", "fp32"))
    assert_agrees(program, mobilevit, 96, "fp32")


def test_mobilevit_in_half_precision(mobilevit, exported, tmp_path):
    program = Program(convert(exported[64], tmp_path / "mobilevit_xxs.mlpackage", "fp16"))
    assert {name: str(item) for name, item in program.outputs().items()} == {"logits": "float32 (1, 10)"}
    assert_agrees(program, mobilevit, 64, "fp16")


def test_each_function_of_a_multifunction_package(mobilevit, exported, tmp_path):
    """iOS 18: attention is one op, and the functions share their weights."""
    descriptor = ct.utils.MultiFunctionDescriptor()
    for size in (64, 96):
        path = convert(exported[size], tmp_path / f"m{size}.mlpackage", "fp16", ct.target.iOS18)
        descriptor.add_function(str(path), "main", f"s{size}")
    descriptor.default_function_name = "s96"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "mobilevit_xxs-ios18.mlpackage"))
    program = Program(tmp_path / "mobilevit_xxs-ios18.mlpackage")
    assert (sorted(program.functions), program.default_function) == (["s64", "s96"], "s96")
    assert program.inputs()["image"].shape == (1, 3, 96, 96)
    for size in (64, 96):
        assert program.inputs(f"s{size}")["image"].shape == (1, 3, size, size)
        assert_agrees(program, mobilevit, size, "fp16", f"s{size}")


class SmallNet(nn.Module):
    """The pieces of MobileNetV2 and V3: strided, depthwise and grouped convolutions, squeeze, hard swish, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 5, 1, 4, 2, groups=16), nn.BatchNorm2d(16), nn.ReLU6())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 1))
        self.same = nn.Conv2d(16, 24, 2, padding="same", groups=2)
        self.head = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(24 * 8 * 8, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.pool(self.stem(image)))
        x = x * nn.functional.hardsigmoid(self.squeeze(x))
        return self.head(nn.functional.interpolate(self.same(x), scale_factor=2).chunk(2, -1)[0][:, :, ::2])


CNNS = {
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.25),
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
}


def check_convolutional(module: nn.Module, path: Path) -> None:
    module = scaled(module, 64)
    assert_agrees(Program(convert(export(module, 64), path, "fp32")), module, 64, "fp32")


def test_a_small_convolutional_network(tmp_path):
    check_convolutional(SmallNet(), tmp_path / "small.mlpackage")


@pytest.mark.slow
@pytest.mark.parametrize("name", CNNS)
def test_convolutional_networks(name, tmp_path):
    check_convolutional(CNNS[name](), tmp_path / f"{name}.mlpackage")
