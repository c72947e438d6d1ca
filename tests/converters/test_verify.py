"""A saved file against a module: its own, a changed one, and files of other makers with other names and shapes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from export_models import pictures
from tampering import tamper_coreml, tamper_onnx, tamper_tflite

import converters
from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature, Size, TensorSpec
from converters.verify import bisect_at, verify

SIZES = Size.parse_list("64,96")


def checked(path, small, **options):
    return verify(path, small, small.signature, pictures, **options)


@pytest.fixture
def stranger(small, tmp_path):
    """The module as another maker's exporter writes it: a file without metadata, fixed at 64, with its own names."""
    path = tmp_path / "stranger.onnx"
    torch.onnx.export(
        small,
        (torch.from_numpy(pictures(SIZES[0], 1)["image"]),),
        str(path),
        dynamo=True,
        external_data=False,
        verbose=False,
        input_names=["pixels"],
        output_names=["scores"],
    )
    return path


@pytest.mark.parametrize("form", ["onnx", "tflite", "coreml"])
def test_a_good_file_agrees_at_every_size(form, paths, small):
    result = checked(paths[form], small)
    assert result.failure is None
    assert [item.size for item in result.verified] == ["64", "96"]
    assert result.precision == ("fp16" if form == "coreml" else "fp32")
    assert result.notes == ()
    limit = 2e-2 if form == "coreml" else 1e-5
    assert all(0 < item.max_abs_over_std < limit and item.cosine > 0.999 for item in result.verified)


def test_a_miss_names_output_and_worst_size(paths, small, tmp_path):
    files = {
        "onnx": tamper_onnx(paths["onnx"], tmp_path / "x.onnx", "module.head.weight", 1.01),
        "tflite": tamper_tflite(paths["tflite"], tmp_path / "x.tflite", "head", (7, 16), 1.01),
        "coreml": tamper_coreml(paths["coreml"], tmp_path / "x.mlpackage", "module_head_weight_to_fp16", 1.5),
    }
    for path in files.values():
        result = checked(path, small)
        worst = max(result.verified, key=lambda item: item.max_abs_over_std)
        assert result.failure is not None
        assert result.failure.exit_code == 3
        assert f"output 'logits' at size {worst.size}" in str(result.failure)
        assert result.worst_size == Size.parse(worst.size)


def test_a_size_that_cannot_be_compared_is_the_worst(small, tmp_path):
    """A file that is right at 64 and gives what is not finite at 96, which no figure can stand for."""
    [artifact] = converters.export(
        small, small.signature, name="small", out=tmp_path, formats=["onnx"], sizes=SIZES, sample_inputs=pictures
    )
    model = onnx.load(artifact.path)
    graph, logits = model.graph, model.graph.output[0].name
    writer = next(node for node in graph.node if logits in node.output)
    writer.output[list(writer.output).index(logits)] = "finite"
    numbers = {"limit": [80], "zero": np.float32([0])}
    for name, value in numbers.items():
        kind = np.float32 if name == "zero" else np.int64
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, kind), name))
    graph.node.extend(
        [
            onnx.helper.make_node("Shape", [graph.input[0].name], ["width"], start=3),
            onnx.helper.make_node("Greater", ["width", "limit"], ["wide"]),
            onnx.helper.make_node("Cast", ["wide"], ["one"], to=onnx.TensorProto.FLOAT),
            onnx.helper.make_node("Div", ["one", "zero"], ["infinite"]),  # 0 / 0 where it is narrow
            onnx.helper.make_node("Where", ["wide", "infinite", "zero"], ["added"]),
            onnx.helper.make_node("Add", ["finite", "added"], [logits]),
        ]
    )
    onnx.save(model, artifact.path)
    result = checked(artifact.path, small)
    assert [item.size for item in result.verified] == ["64"]
    assert "at size 96 is not finite" in str(result.failure)
    assert result.worst_size == SIZES[1]


def test_only_the_asked_sizes_are_run(paths, small):
    assert [item.size for item in checked(paths["onnx"], small, sizes=Size.parse_list("72")).verified] == ["72"]
    with pytest.raises(EdgeVitError, match="does not hold size 72; it holds 64, 96"):
        checked(paths["tflite"], small, sizes=Size.parse_list("72"))
    with pytest.raises(EdgeVitError, match="multiple of 8"):
        checked(paths["onnx"], small, sizes=Size.parse_list("70"))


def test_another_makers_names_are_taken_by_position(stranger, small):
    result = checked(stranger, small)
    assert result.failure is None
    assert [item.size for item in result.verified] == ["64"]
    assert result.notes == (
        "the file's input 'pixels' is taken for the module's 'image', by position and shape",
        "the file's output 'scores' is taken for the module's 'logits', by position and shape",
    )
    with torch.no_grad():
        small_again = bisect_at(stranger, small, small.signature, pictures, SIZES[0])
    assert small_again.culprit is None


def test_another_makers_file_is_held_to_fp32(stranger, small, tmp_path):
    weight = next(item.name for item in onnx.load(stranger).graph.initializer if item.name.endswith("head.weight"))
    result = checked(tamper_onnx(stranger, tmp_path / "x.onnx", weight, 1.001), small)
    assert result.precision == "fp32"
    assert "fp32 allows 0.0001" in str(result.failure)
    assert bisect_at(tmp_path / "x.onnx", small, small.signature, pictures, SIZES[0]).culprit.module == "head"


def make(path, shape, outputs=("y",)):
    """A file that copies its input `x` to each of `outputs`."""
    tensor = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], [name]) for name in outputs],
        "graph",
        [onnx.helper.make_tensor_value_info("x", tensor, shape)],
        [onnx.helper.make_tensor_value_info(name, tensor, shape) for name in outputs],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("shape", "outputs", "message"),
    [
        ([1, 64, 64, 3], ["y"], r"laid out as \(N, H, W, C\)"),
        ([1, 3, 64, 64], ["y", "z"], "has 2 outputs"),
        ([1, 3, 64, 64], ["y"], "output 'y' is 1 × 3 × 64 × 64, the module's 'logits' at size 64 is any × 7"),
        ([1, 1, 64, 64], ["y"], "input 'x' is 1 × 1 × 64 × 64"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(shape, outputs, message, small, tmp_path):
    with pytest.raises(EdgeVitError, match=message) as caught:
        checked(make(tmp_path / "x.onnx", shape, outputs), small, sizes=SIZES[:1])
    assert "\n" not in str(caught.value)


def test_a_file_that_names_no_size_asks_for_one(small, tmp_path):
    with pytest.raises(EdgeVitError, match="give them, such as --size 256"):
        checked(make(tmp_path / "x.onnx", [1, 3, "height", "width"]), small)


def test_a_file_that_takes_pictures(small, tmp_path):
    """Preprocessing is inside the file; the module's own is put before the module."""
    inside = Preprocessing(size="64", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    [artifact] = converters.export(
        small,
        small.signature,
        name="small",
        out=tmp_path,
        formats=["onnx"],
        sizes=SIZES[:1],
        input="image",
        sample_inputs=pictures,
        preprocessing=inside,
    )
    result = checked(artifact.path, small, preprocessing=inside)
    assert result.failure is None
    assert [item.output for item in result.verified] == ["probabilities"]
    assert checked(artifact.path, small, preprocessing=Preprocessing(size="64")).failure is not None
    assert bisect_at(artifact.path, small, small.signature, pictures, SIZES[0], preprocessing=inside).culprit is None
    with pytest.raises(EdgeVitError, match="takes pictures"):
        checked(artifact.path, small)


def test_nothing_is_written(paths, small):
    before = {path: path.stat().st_mtime_ns for path in paths["onnx"].parent.rglob("*")}
    checked(paths["onnx"], small)
    assert {path: path.stat().st_mtime_ns for path in paths["onnx"].parent.rglob("*")} == before


def test_integer_arrays_do_not_pass_for_pictures(paths, small):
    def integers(size, count):
        return {"image": np.ones((count, 3, size.height, size.width), np.float32)}

    with pytest.raises(EdgeVitError, match="prove nothing"):
        verify(paths["onnx"], small, small.signature, integers)


def numbers(*shape, high=None):
    """`sample_inputs` for an input `x`: the same normal numbers every time, or whole ones below `high`."""

    def samples(_size, count):
        generator = np.random.default_rng(0)
        wanted = (count, *shape)
        whole = generator.integers(0, high, wanted) if high else None
        return {"x": generator.standard_normal(wanted, np.float32) if whole is None else whole}

    return samples


def exported(module, signature, samples, folder):
    [artifact] = converters.export(
        module, signature, name="x", out=folder, formats=["tflite"], sample_inputs=samples, progress=lambda line: None
    )
    return artifact.path


def test_a_file_without_a_batch_takes_one_example_at_a_time(tmp_path):
    """Its first length is 8, which is no number of examples."""
    signature = Signature((TensorSpec("x", (8,)),), (TensorSpec("y", (4,)),))
    module, samples = torch.nn.Linear(8, 4).eval(), numbers(8)
    path = exported(module, signature, samples, tmp_path)
    assert verify(path, module, signature, samples).failure is None
    assert bisect_at(path, module, signature, samples, Size(())).culprit is None


def test_whole_numbers_are_narrowed_for_intermediate_values_too(tmp_path, capfd):
    signature = Signature((TensorSpec("x", ("batch", 5), "int64", "tokens"),), (TensorSpec("y", ("batch", 5, 4)),))
    module, samples = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 4)).eval(), numbers(5, high=9)
    path = exported(module, signature, samples, tmp_path)
    assert bisect_at(path, module, signature, samples, Size(())).culprit is None
    assert capfd.readouterr() == ("", "")


def test_a_claim_of_fp16_does_not_widen_what_float32_weights_may_lose(paths, small, tmp_path):
    """Off by more than fp32 allows and less than fp16 does, in a file that says fp16 of itself."""
    off = tamper_onnx(paths["onnx"], tmp_path / "off.onnx", "module.head.weight", 1.002)
    model = onnx.load(off)
    [entry] = [item for item in model.metadata_props if item.key == "edgevit"]
    entry.value = entry.value.replace('"precision":"fp32"', '"precision":"fp16"')
    onnx.save(model, off)
    found = verify(off, small, small.signature, pictures)
    assert 1e-4 < max(item.max_abs_over_std for item in found.verified) < 2e-2
    assert "fp32 allows" in str(found.failure)
