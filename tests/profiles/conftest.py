"""A real TFLite file, converted once for all tests here."""

import os
from pathlib import Path

import pytest
from tiny_models import BIAS, WEIGHT


@pytest.fixture(scope="session")
def tflite_file(tmp_path_factory) -> Path:
    """The tiny model of `tiny_models`, with signatures size_16 and size_32."""
    import litert_torch
    import torch

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(torch.tensor(WEIGHT)), torch.nn.Parameter(torch.tensor(BIAS))

        def forward(self, image):
            return {"logits": image.mean((2, 3)) @ self.weight + self.bias}

    path = tmp_path_factory.mktemp("tflite") / "tiny.tflite"
    model, conversion = Tiny().eval(), litert_torch
    for size in (16, 32):
        example = {"image": torch.rand(1, 3, size, size)}
        conversion = conversion.signature(f"size_{size}", model, sample_kwargs=example)
    conversion.convert().export(os.fspath(path))
    return path
