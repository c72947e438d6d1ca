"""What cannot be converted is named: the operation, the module in the user's model, and the user's own line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import foreign_models
import pytest
from foreign_models import Blocks, Eigenvalues, Undecided, square_signature

from converters.errors import EdgeVitError
from converters.quiet import quiet
from converters.signature import Size
from converters.unsupported import unsupported

LINES = Path(foreign_models.__file__).read_text().splitlines()


def refusal(form, module, signature, folder):
    with pytest.raises(EdgeVitError) as caught, quiet():
        import_module(f"converters.{form}").convert(
            module.eval(), signature, (Size(()),), folder / f"x.{form}", precision="fp32", batch=1, samples={}
        )
    assert not list(folder.iterdir())
    message = str(caught.value)
    assert "\n" not in message
    return message


def line_of(text):
    return next(number for number, line in enumerate(LINES, 1) if text in line)


@pytest.mark.parametrize("form", ["onnx", "tflite"])
def test_an_operation_without_a_counterpart(form, tmp_path):
    message = refusal(form, Blocks(Eigenvalues()), square_signature(4), tmp_path)
    assert message.startswith(f"{form} cannot convert aten._linalg_eigh.default in module 'blocks.1'")
    assert f"foreign_models.py:{line_of('# the line to name')} (" in message
    assert "torch.linalg.eigvalsh" in message


@pytest.mark.parametrize("form", ["onnx", "tflite"])
def test_a_branch_that_depends_on_the_data(form, tmp_path):
    message = refusal(form, Blocks(Undecided()), square_signature(4, 4), tmp_path)
    assert "torch.export cannot trace the module" in message
    assert f"foreign_models.py:{line_of('# another line to name')} (" in message


def test_what_the_mlir_passes_cannot_legalize():
    error = RuntimeError("loc(\"net/model.py\":31:0): error: failed to legalize operation 'stablehlo.rng' that was …")
    assert str(unsupported(error, "tflite")).startswith(
        "tflite cannot convert stablehlo.rng, called at net/model.py:31"
    )


def test_other_failures_are_left_to_who_knows_them():
    assert unsupported(ValueError("something else"), "onnx") is None
    full = RuntimeError("failed to legalize operation 'x'")
    full.__cause__ = OSError(28, "No space left on device")
    assert unsupported(full, "onnx") is None
