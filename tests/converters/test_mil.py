"""The Core ML evaluator's promises about files, types and precision; its ops are checked in test_mil_ops.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 (its own documentation's name)
from coremltools.converters.mil.mil import types
from coremltools.proto import MIL_pb2, Model_pb2

from converters.errors import EdgeVitError
from converters.mil import Program

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(40, 60)).astype(np.float32)  # large enough to go to the blob file
MODEL_FILE = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHT_FILE = Path("Data/com.apple.CoreML/weights/weight.bin")


def save(program, path: Path, target=ct.target.iOS16, **metadata: str) -> Path:
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,  # leaves the program's own types
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.user_defined_metadata.update(metadata)
    model.save(str(path))
    return path


def edited(path: Path, folder: Path, edit: Callable) -> Path:
    """A copy of a package whose main function's block went through `edit`."""
    copy = Path(shutil.copytree(path, folder / "edited.mlpackage"))
    spec = Model_pb2.Model.FromString((copy / MODEL_FILE).read_bytes())
    function = spec.mlProgram.functions["main"]
    edit(function.block_specializations[function.opset])
    (copy / MODEL_FILE).write_bytes(spec.SerializeToString())
    return copy


def operation(block, kind: str):
    return next(item for item in block.operations if item.type == kind)


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """y = relu(x · Wᵀ) for x of (3, 60)."""

    @mb.program(input_specs=[mb.TensorSpec(shape=(3, 60))], opset_version=ct.target.iOS16)
    def program(x):
        return mb.relu(x=mb.linear(x=x, weight=WEIGHT, name="product"), name="y")

    return save(program, tmp_path_factory.mktemp("small") / "small.mlpackage", edgevit="{}", note="text")


@pytest.fixture
def x() -> dict[str, np.ndarray]:
    return {"x": RNG.normal(size=(3, 60)).astype(np.float32)}


def test_a_program_says_what_it_takes_and_gives(package):
    program = Program(package)
    assert (program.functions, program.default_function) == (["main"], "main")
    assert {name: (item.shape, item.dtype) for name, item in program.inputs().items()} == {"x": ((3, 60), "float32")}
    assert {name: str(item) for name, item in program.outputs("main").items()} == {"y": "float32 (3, 40)"}
    assert program.metadata["edgevit"] == "{}"
    assert program.metadata["note"] == "text"


def test_a_loaded_program_needs_its_folder_no_more(package, tmp_path, x):
    copy = Path(shutil.copytree(package, tmp_path / "copy.mlpackage"))
    program = Program(copy)
    shutil.rmtree(copy)
    expected = np.maximum(x["x"] @ WEIGHT.T, 0)
    for _ in range(2):  # a run leaves nothing behind that changes the next one
        np.testing.assert_allclose(program.run(x)["y"], expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_left_alone_and_outputs_are_the_callers(package, x):
    program, before = Program(package), x["x"].copy()
    first = program.run(x)["y"]
    first[:] = -1
    assert (x["x"] == before).all()
    assert program.run(x)["y"].min() == 0


def test_every_op_rounds_its_result_to_fp16(tmp_path):
    a, b = (RNG.normal(size=(4, 50)).astype(np.float16) for _ in range(2))

    @mb.program(input_specs=[mb.TensorSpec(shape=(4, 50), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x):
        product = mb.mul(x=x, y=a)
        return mb.add(x=mb.reshape(x=product, shape=(4, 50)), y=b, name="y")

    loaded = Program(save(program, tmp_path / "half.mlpackage"))
    x = RNG.normal(size=(4, 50)).astype(np.float16)
    found = loaded.run({"x": x})["y"]
    assert found.dtype == np.float16
    assert (found == x * a + b).all()  # numpy rounds each product and each sum, too
    once = (x.astype(np.float32) * a + b).astype(np.float16)
    assert (found != once).any(), "these values cannot tell one rounding from two"


def test_what_depends_on_constants_alone_may_be_an_argument(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec(shape=(2, 6))], opset_version=ct.target.iOS16)
    def program(x):
        shape = mb.concat(values=[np.array([3], np.int32), mb.add(x=np.array([1], np.int32), y=3)], axis=0)
        return mb.reshape(x=x, shape=shape, name="y")

    x = RNG.normal(size=(2, 6)).astype(np.float32)
    path = save(program, tmp_path / "folded.mlpackage")
    kinds = {
        item.type
        for item in ct.utils.load_spec(str(path))
        .mlProgram.functions["main"]
        .block_specializations["CoreML6"]
        .operations
    }
    assert {"concat", "add"} <= kinds
    assert (Program(path).run({"x": x})["y"] == x.reshape(3, 4)).all()


def test_an_argument_may_be_computed_at_run_time(tmp_path):
    @mb.program(
        input_specs=[mb.TensorSpec(shape=(2, 6)), mb.TensorSpec(shape=(2,), dtype=types.int32)],
        opset_version=ct.target.iOS16,
    )
    def program(x, numbers):
        part = mb.slice_by_index(x=x, begin=numbers, end=[2, 5], end_mask=[True, False])
        return mb.reshape(x=x, shape=numbers, name="y"), mb.add(x=part, y=0.0, name="part")

    loaded = Program(save(program, tmp_path / "dynamic.mlpackage"))
    x = RNG.normal(size=(2, 6)).astype(np.float32)
    for numbers in ([1, 12], [-1, 4]):
        found = loaded.run({"x": x, "numbers": np.array(numbers, np.int32)})
        assert (found["y"] == x.reshape(numbers)).all()
        assert (found["part"] == x[numbers[0] :, numbers[1] : 5]).all()
    with pytest.raises(EdgeVitError, match=r"op reshape \('y'\): shape '\[5, 5\]' is invalid") as error:
        loaded.run({"x": x, "numbers": np.array([5, 5], np.int32)})
    one_line(error)


def test_a_size_that_is_declared_unknown_may_be_any(package, tmp_path):
    copy = Path(shutil.copytree(package, tmp_path / "edited.mlpackage"))
    spec = Model_pb2.Model.FromString((copy / MODEL_FILE).read_bytes())
    function = spec.mlProgram.functions["main"]
    values = [*function.inputs]
    for item in function.block_specializations[function.opset].operations:
        values += item.outputs if item.type in ("linear", "relu") else []
    for value in values:
        value.type.tensorType.dimensions[0].unknown.variadic = False
    (copy / MODEL_FILE).write_bytes(spec.SerializeToString())
    program = Program(copy)
    assert program.inputs()["x"].shape == (None, 60)
    for n in (1, 4):
        x = RNG.normal(size=(n, 60)).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], np.maximum(x @ WEIGHT.T, 0), rtol=1e-5, atol=1e-5)


def test_all_missing_ops_are_named_at_once(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec(shape=(2, 6))], opset_version=ct.target.iOS16)
    def program(x):
        shape = mb.shape(x=x)
        return mb.add(
            x=mb.random_normal(shape=shape), y=mb.random_normal(shape=mb.shape(x=mb.random_uniform(shape=shape)))
        )

    with pytest.raises(EdgeVitError, match=r"lacks the ops random_normal \(×2\), random_uniform \(×1\)$") as error:
        Program(save(program, tmp_path / "missing.mlpackage"))
    one_line(error)


UNSUPPORTED = {
    "interpolation_mode 'NEAREST_NEIGHBOR' with": lambda x: mb.resize(
        x=x,
        shape=np.array([8, 8], np.int32),
        resized_dims=np.uint32(2),
        interpolation_mode="NEAREST_NEIGHBOR",
        sampling_mode="ALIGN_CORNERS",
    ),
    "align_corners False with half_pixel_centers False": lambda x: mb.upsample_bilinear(
        x=x, scale_factor_height=2, scale_factor_width=2, align_corners=False, half_pixel_centers=False
    ),
    "mode 'replicate' over more": lambda x: mb.pad(x=x, pad=[1] * 8, mode="replicate"),
    "sort False": lambda x: mb.topk(x=x, k=2, axis=1, sort=False),
    "pad_value 1.0": lambda x: mb.crop_resize(x=x, boxes=np.zeros((1, 4), np.float32), pad_value=np.float32(1.0)),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_an_argument_that_the_evaluator_lacks_is_named(tmp_path, reason):
    target = ct.target.iOS17 if "NEAREST" in reason or "pad_value" in reason else ct.target.iOS16

    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 2, 4, 4))], opset_version=target)
    def program(x):
        return UNSUPPORTED[reason](x)

    with pytest.raises(EdgeVitError, match=rf"op \w+ \('.*'\): not supported: {reason}") as error:
        Program(save(program, tmp_path / "argument.mlpackage", target))
    one_line(error)


def test_an_unknown_argument_is_named(package, tmp_path):
    def rename(block):
        inputs = operation(block, "linear").inputs
        inputs["scale"].CopyFrom(inputs["weight"])

    with pytest.raises(EdgeVitError, match=r"op linear \('product'\): not supported: .*'scale'"):
        Program(edited(package, tmp_path, rename))


def test_a_missing_argument_is_named(package, tmp_path):
    with pytest.raises(EdgeVitError, match=r"op linear \('product'\): input 'weight' is missing"):
        Program(edited(package, tmp_path, lambda block: operation(block, "linear").inputs.pop("weight")))


def set_size(block):
    operation(block, "linear").outputs[0].type.tensorType.dimensions[0].constant.size = 2


def set_integer(block):
    operation(block, "relu").outputs[0].type.tensorType.dataType = MIL_pb2.INT32


def test_a_result_that_is_not_as_declared_is_refused(package, tmp_path, x):
    (tmp_path / "a").mkdir()
    program = Program(edited(package, tmp_path / "a", set_size))
    with pytest.raises(
        EdgeVitError, match=r"op linear .*'product' is float32 \(3, 40\), .* declares float32 \(2, 40\)"
    ):
        program.run(x)
    program = Program(edited(package, tmp_path, set_integer))
    with pytest.raises(EdgeVitError, match=r"op relu .*'y' is float32 \(3, 40\), the program declares int32 \(3, 40\)"):
        program.run(x)


def test_half_and_single_precision_are_not_mistaken_for_each_other(package, tmp_path):
    def set_half(block):
        operation(block, "relu").outputs[0].type.tensorType.dataType = MIL_pb2.FLOAT16

    with pytest.raises(EdgeVitError, match=r"op relu .*'y' is declared float16 \(3, 40\), its inputs float32"):
        Program(edited(package, tmp_path, set_half))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "takes x; got nothing"),
        ({"image": np.zeros((3, 60), np.float32)}, "takes x; got image"),
        (
            {"x": np.zeros((4, 60), np.float32)},
            r"input 'x' is float32 \(4, 60\), the program declares float32 \(3, 60\)",
        ),
        ({"x": np.zeros((3, 60))}, r"input 'x' is float64 \(3, 60\), the program declares float32 \(3, 60\)"),
    ],
)
def test_other_inputs_are_refused(package, inputs, message):
    with pytest.raises(EdgeVitError, match=message) as error:
        Program(package).run(inputs)
    one_line(error)


def test_a_function_that_is_not_there_is_refused(package, x):
    with pytest.raises(EdgeVitError, match="no function 's64'; it has main"):
        Program(package).run(x, "s64")


def missing(path: Path) -> None:
    shutil.rmtree(path)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def garbage(path: Path) -> None:
    (path / MODEL_FILE).write_bytes(b"garbage" * 99)


def another_kind(path: Path) -> None:
    spec = Model_pb2.Model(specificationVersion=4)
    spec.neuralNetwork.layers.add(name="layer")
    (path / MODEL_FILE).write_bytes(spec.SerializeToString())


def without_weights(path: Path) -> None:
    (path / WEIGHT_FILE).unlink()


def cut_short(path: Path) -> None:
    content = (path / WEIGHT_FILE).read_bytes()
    (path / WEIGHT_FILE).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, "no such file"),
        (empty, "not a readable .mlpackage"),
        (garbage, "not a readable .mlpackage"),
        (another_kind, "holds neuralNetwork, not an ML Program"),
        (without_weights, r"constant of float32 \(40, 60\) cannot be read"),
        (cut_short, r"constant of float32 \(40, 60\) cannot be read"),
    ],
)
def test_a_damaged_package_is_one_clear_line(package, tmp_path, damage, message):
    copy = Path(shutil.copytree(package, tmp_path / "damaged.mlpackage"))
    damage(copy)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EdgeVitError, match=rf"damaged\.mlpackage: .*{message}") as error:
        Program(copy)
    one_line(error)
    assert sorted(tmp_path.rglob("*")) == before  # looking does not write
