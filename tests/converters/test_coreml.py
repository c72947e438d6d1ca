"""What a Core ML export promises: precision, pictures, names, states and shapes, as the saved file shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from export_models import Small, lively_small, pictures
from torch import Tensor, nn

from converters import coreml
from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.mil import Program
from converters.picture import PictureInput, to_pictures
from converters.signature import Signature, Size, TensorSpec
from edgevit.cli.run_coreml import command

SIZE = Size.parse("32")
VECTOR = Signature((TensorSpec("a", ("batch", 64)),), (TensorSpec("y", ("batch", 64)),))
FIXED = Size(())


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def export(module: nn.Module, path: Path, signature: Signature = VECTOR, samples: Any = None, **how: Any) -> list[str]:
    size = FIXED if not signature.dims else SIZE
    given = {"a": normal(4, 64)} if samples is None else samples
    defaults: dict[str, Any] = {"precision": "fp16", "batch": 1}
    return coreml.convert(module.eval(), signature, [size], path, samples={size: given}, **(defaults | how))


def error(path: Path, module: nn.Module) -> float:
    program, x = Program(path), normal(4, 64)
    found = np.concatenate([program.run({"a": row[None]})["y"] for row in x])
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    return float(abs(found - expected).max() / expected.std())


class Offset(nn.Module):
    """Adds much and takes it off again: what is left in fp16 is noise."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.offset = nn.Linear(64, 64), nn.Linear(64, 64), offset

    def forward(self, a: Tensor) -> Tensor:
        return self.last(torch.relu((self.first(a) + self.offset).abs() - self.offset))


def single(path: Path) -> set[str]:
    """Kinds of ops whose results are float32, casts apart."""
    ops = Program(path).ops()
    return {op.kind for op in ops if op.kind != "cast" and {kind.dtype for kind in op.outputs.values()} == {"float32"}}


def test_a_program_that_fp16_serves_well_is_left_alone(tmp_path):
    assert export(Offset(0.5), tmp_path / "m.mlpackage") == []
    assert single(tmp_path / "m.mlpackage") == set()


def test_ops_that_fp16_is_too_coarse_for_stay_in_fp32(tmp_path):
    """Nothing here passes fp16's range; without fp32 the error would be far over the tolerance."""
    module, path = Offset(500.0), tmp_path / "m.mlpackage"
    (note,) = export(module, path)
    assert "kept in fp32" in note
    assert "Neural Engine" in note
    assert "off by" in note
    assert error(path, module) < 2e-2
    assert "add" in single(path)


def test_ops_whose_values_pass_fp16s_range_stay_in_fp32(tmp_path):
    module, path = Offset(1e5), tmp_path / "m.mlpackage"
    (note,) = export(module, path)
    assert "reaches 100,00" in note
    assert np.isfinite(error(path, module))
    assert {"add", "abs"} <= single(path)


def test_weights_that_stay_fp32_in_an_fp16_file_are_refused(tmp_path):
    path = tmp_path / "m.mlpackage"
    export(Offset(0.5), path, precision="fp32")
    with pytest.raises(EdgeVitError, match=r"weights of linear 'linear.*' are still fp32"):
        coreml._check_weights(path, {})


def test_coremltools_turns_the_tanh_gelu_into_the_exact_one_and_our_export_does_not(tmp_path):
    class Gelu(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return nn.functional.gelu(2 * a, approximate="tanh")

    x = normal(1, 64)
    raw = torch.export.export(Gelu(), (torch.from_numpy(x),)).run_decompositions({})
    model = ct.convert(raw, compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    model.save(str(tmp_path / "raw.mlpackage"))
    program = Program(tmp_path / "raw.mlpackage")
    found = next(iter(program.run({next(iter(program.inputs())): x}).values()))
    exact = nn.functional.gelu(torch.from_numpy(2 * x)).numpy()
    np.testing.assert_allclose(found, exact, atol=1e-6)  # the fault, as coremltools 9.0 has it
    export(Gelu(), tmp_path / "ours.mlpackage", precision="fp32")
    ours = Program(tmp_path / "ours.mlpackage").run({"a": x})["y"]
    np.testing.assert_allclose(ours, Gelu()(torch.from_numpy(x)).numpy(), atol=1e-6)
    assert abs(ours - exact).max() > 1e-4
    assert [op.kind for op in Program(tmp_path / "ours.mlpackage").ops()][-1] == "gelu"  # one op, not its parts


def test_an_op_without_a_conversion_is_named_with_its_module_and_line(tmp_path):
    class Inner(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return torch.special.bessel_j0(a)

    module = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), Inner()))
    with pytest.raises(
        EdgeVitError, match=r"op aten\.special_bessel_j0\S* in module '1\.1', test_coreml\.py:\d+: core"
    ):
        export(module, tmp_path / "m.mlpackage")


def test_names_are_the_signatures_for_any_outputs(tmp_path):
    class Odd(nn.Module):
        def forward(self, a: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            y = a * 2
            return y, n, a, y, n + 1

    inputs = (TensorSpec("a", ("batch", 64)), TensorSpec("n", ("batch", 2), "int64"))
    names = ("y", "n_again", "a_again", "y_again", "more")
    outputs = tuple(TensorSpec(name, ("batch", 2), "int64" if name[0] in "nm" else "float32") for name in names)
    samples = {"a": normal(4, 64), "n": np.arange(8).reshape(4, 2)}
    path = tmp_path / "m.mlpackage"
    export(Odd(), path, Signature(inputs, outputs), samples, precision="fp32")
    program = Program(path)
    assert {name: kind.dtype for name, kind in program.inputs().items()} == {"a": "float32", "n": "int32"}
    a, n = samples["a"][:1], samples["n"][:1].astype(np.int32)
    found = program.run({"a": a, "n": n})
    assert list(found) == list(names)
    for name, expected in zip(names, (2 * a, n, a, 2 * a, n + 1), strict=True):
        assert found[name].tolist() == expected.tolist()
    assert coreml.describe(path)["main"] == (program.inputs(), program.outputs())


LABELS = [f"class {number}" for number in range(7)]


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize("std", [(0.2, 0.2, 0.2), (0.2, 0.25, 0.3)])
def test_a_picture_goes_in_and_a_label_comes_out(order, std, tmp_path):
    preprocessing = Preprocessing(size="32", mean=(0.1, 0.2, 0.3), std=std, channel_order=order)
    module = PictureInput(lively_small(), preprocessing, Small.signature).eval()
    shown = to_pictures(pictures(SIZE, 4), preprocessing)
    path = tmp_path / "m.mlpackage"
    export(module, path, module.signature, shown, precision="fp32", labels=LABELS)
    program = Program(path)
    picture = shown["image"][:1]
    found = program.run({"image": picture})
    with torch.no_grad():
        (expected,) = module(torch.from_numpy(picture))
    np.testing.assert_allclose(found["probabilities"], expected.numpy(), atol=1e-5)
    assert found["classLabel"].tolist() == [LABELS[int(expected.argmax())]]
    spec = ct.utils.load_spec(str(path))
    assert spec.description.input[0].type.imageType.colorSpace == {"RGB": 20, "BGR": 30}[order]
    assert spec.description.predictedProbabilitiesName == "probabilities"
    inputs, outputs = coreml.describe(path)["main"]
    assert (inputs["image"].shape, inputs["image"].dtype) == ((1, 32, 32, 3), "uint8")
    assert outputs["probabilities"].shape == (1, 7)


def test_a_classifiers_softmax_stays_in_fp32_in_each_function(tmp_path):
    preprocessing = Preprocessing(size="32", mean=(0.1, 0.2, 0.3))
    module = PictureInput(lively_small(), preprocessing, Small.signature).eval()
    sizes = Size.parse_list("32,64")
    shown = {size: to_pictures(pictures(size, 4), preprocessing) for size in sizes}
    path = tmp_path / "m.mlpackage"
    how: dict[str, Any] = {"precision": "fp16", "batch": 1, "samples": shown, "target": "ios18", "labels": LABELS}
    assert coreml.convert(module, module.signature, sizes, path, **how) == []
    program = Program(path)
    assert (sorted(program.functions), program.default_function) == (["size_32", "size_64"], "size_32")
    for size in sizes:
        last = [op for op in program.ops(size.entry_point) if op.kind == "softmax"][-1]
        assert [kind.dtype for kind in last.outputs.values()] == ["float32"]
        picture = shown[size]["image"][:1]
        found = program.run({"image": picture}, size.entry_point)
        with torch.no_grad():
            (expected,) = module(torch.from_numpy(picture))
        np.testing.assert_allclose(np.log(found["probabilities"]), expected.log().numpy(), atol=2e-2)
        assert coreml.describe(path)[size.entry_point][0]["image"].shape == (1, size.height, size.width, 3)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "m.mlpackage"
    export(Offset(0.5), path, precision="fp32")
    return path


def test_run_coreml_runs_files(package, tmp_path):
    x = normal(1, 64).astype(np.float64)  # cast, as it is of the right kind
    np.save(tmp_path / "x.npy", x)
    arguments = [str(package), "--input", f"a={tmp_path / 'x.npy'}", "--output", str(tmp_path / "out"), "--ranges"]
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    said, y = json.loads(result.output), np.load(tmp_path / "out" / "y.npy")
    with torch.no_grad():
        expected = Offset(0.5)(torch.from_numpy(x.astype(np.float32))).numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert said["outputs"]["y"] == {"dtype": "float32", "shape": [1, 64], "min": float(y.min()), "max": float(y.max())}
    assert said["ranges"]["y"] == pytest.approx(float(abs(y).max()))
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["y.npy"]
    listed = CliRunner().invoke(command, [str(package)], catch_exceptions=False)
    assert [line.split() for line in listed.output.splitlines()][1:] == [
        ["a", "input", "float32", "1", "×", "64"],
        ["y", "output", "float32", "1", "×", "64"],
    ]


def test_json_stays_json_where_a_value_is_not_finite(package, tmp_path):
    np.save(tmp_path / "x.npy", np.full((1, 64), np.nan, np.float32))
    result = CliRunner().invoke(command, [str(package), "--input", str(tmp_path / "x.npy"), "--ranges", "--json"])
    said = json.loads(result.output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert said["ranges"]["y"] == "nan"
    assert said["outputs"]["y"]["not finite"] == 64


def test_an_input_given_twice_is_refused(package, tmp_path):
    np.save(tmp_path / "x.npy", normal(1, 64))
    twice = ["--input", f"a={tmp_path / 'x.npy'}"] * 2
    result = CliRunner().invoke(command, [str(package), *twice])
    assert isinstance(result.exception, EdgeVitError)
    assert "a is given twice" in str(result.exception)


def test_truth_values_as_outputs_are_refused_before_any_work(tmp_path):
    class Positive(torch.nn.Module):
        def forward(self, a):
            return a > 0

    signature = Signature((TensorSpec("a", ("batch", 4)),), (TensorSpec("y", ("batch", 4), "bool"),))
    with pytest.raises(EdgeVitError, match=r"output 'y' holds truth values, which Core ML has no outputs of"):
        coreml.convert(
            Positive(), signature, (Size(()),), tmp_path / "x.mlpackage", precision="fp32", batch=1, samples={}
        )


@pytest.mark.parametrize(
    ("spelled", "content", "message"),
    [
        ("a={}", b"no array", "not a .npy file"),
        ("b={}", b"", "the program takes a"),
        ("a=nowhere.npy", b"", "no such file"),
    ],
)
def test_a_bad_input_file_is_one_line(package, tmp_path, spelled, content, message):
    file = tmp_path / "x.npy"
    file.write_bytes(content)
    result = CliRunner().invoke(command, [str(package), "--input", spelled.format(file)])
    assert isinstance(result.exception, EdgeVitError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
