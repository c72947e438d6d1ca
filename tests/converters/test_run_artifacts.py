"""Loading any artifact: this project's, another's, and files that are none."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import numpy as np
import onnx
import pytest
import torch
from export_models import pictures

from converters import onnx as onnx_format
from converters import run
from converters.artifact import Metadata, Preprocessing, written_beside
from converters.errors import EdgeVitError
from converters.signature import Size

SUFFIX = {"onnx": ".onnx", "tflite": ".tflite", "coreml": ".mlpackage"}
FORMATS = tuple(SUFFIX)


def copied(path, folder):
    target = folder / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    return target


def content_of(path):
    """The file whose bytes matter: of a package, its specification."""
    return next(path.rglob("model.mlmodel")) if path.is_dir() else path


@pytest.mark.parametrize("size", ["64", "96"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_session_gives_the_modules_outputs(form, size, small, paths):
    inputs = pictures(Size.parse(size), 1)
    session = run.load(paths[form], size=Size.parse(size), threads=2)
    with torch.no_grad():
        expected = small(torch.from_numpy(inputs["image"])).numpy()
    outputs = session.run(inputs)
    assert list(outputs) == ["logits"]
    assert outputs["logits"].dtype == np.float32
    assert np.abs(outputs["logits"] - expected).max() < (2e-2 if form == "coreml" else 1e-4)
    assert session.batch == ("dynamic" if form == "onnx" else 1)
    assert session.metadata.model == "small"
    assert session.runtime == {"onnx": "onnxruntime", "tflite": "litert", "coreml": "coreml"}[form]


@pytest.mark.parametrize("form", FORMATS)
def test_open_artifact_reads_what_was_written(form, small_files, paths):
    artifact = run.open_artifact(str(paths[form]))
    assert artifact.metadata.to_json() == small_files[form].metadata.to_json()
    assert [str(size) for size in artifact.sizes] == ["64", "96"]


def test_two_outputs_of_a_session_are_two_arrays(paths):
    session = run.load(paths["tflite"], size=Size.parse("64"))
    inputs = pictures(Size.parse("64"), 2)["image"]
    first = session.run({"image": inputs[:1]})["logits"]
    kept = first.copy()
    session.run({"image": inputs[1:]})
    assert np.array_equal(first, kept)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"picture": np.zeros((1, 3, 64, 64), np.float32)}, "takes image, not picture"),
        ({}, "takes image, not nothing"),
        ({"image": np.zeros((1, 3, 96, 96), np.float32)}, r"'image' takes .*3 × 64 × 64, not 1 × 3 × 96 × 96"),
        ({"image": np.zeros((3, 64, 64), np.float32)}, "not 3 × 64 × 64"),
        ({"image": np.zeros((1, 3, 64, 64), np.complex64)}, "takes float32, not complex64"),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_wrong_inputs(form, inputs, message, paths):
    session = run.load(paths[form], size=Size.parse("64"))
    with pytest.raises(EdgeVitError, match=message):
        session.run(inputs)


@pytest.mark.parametrize("form", ["tflite", "coreml"])
def test_a_size_that_the_file_does_not_hold(form, paths):
    with pytest.raises(EdgeVitError, match="does not hold size 128; it holds 64, 96"):
        run.load(paths[form], size=Size.parse("128"))
    with pytest.raises(EdgeVitError, match=r"several sizes \(64, 96\); say which"):
        run.load(paths[form])


def test_a_dynamic_file_takes_any_size_that_its_model_takes(paths):
    assert run.load(paths["onnx"]).run(pictures(Size.parse("40x128"), 3))["logits"].shape == (3, 7)
    with pytest.raises(EdgeVitError, match="multiple of 8; nearest: 96 or 104"):
        run.load(paths["onnx"], size=Size.parse("100"))


def test_another_projects_file_has_no_metadata_but_runs(paths, tmp_path):
    path = copied(paths["onnx"], tmp_path)
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(EdgeVitError, match="carries no edgevit metadata"):
        run.open_artifact(path)
    session = run.load(path, size=Size.parse("64"))
    assert session.metadata is None
    assert session.inputs == (run.Port("image", (None, 3, None, None)),)
    assert session.run(pictures(Size.parse("64"), 2))["logits"].shape == (2, 7)


def test_another_projects_tflite_and_coreml_files_run_too(paths, tmp_path):
    from converters import coreml, tflite

    for form, module in (("tflite", tflite), ("coreml", coreml)):
        path = copied(paths[form], tmp_path)
        module.embed(path, "x")
        with pytest.raises(EdgeVitError, match="metadata cannot be read"):
            run.load(path)


def test_metadata_that_is_not_this_versions(paths, tmp_path):
    path = copied(paths["onnx"], tmp_path)
    onnx_format.embed(path, '{"model": "x"}')
    with pytest.raises(EdgeVitError, match=r"small\.onnx: edgevit metadata cannot be read"):
        run.open_artifact(path)


def within(*path, value):
    """A change of the value that lies at `path`."""

    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


HOSTILE = {
    "sizes is 64": within("sizes", 0, value=64),
    "sizes is None": within("sizes", value=None),
    "size 'big'": within("sizes", 0, value="big"),
    "must be a multiple of 8": within("sizes", 0, value="63"),
    "this model's sizes give height, width": within("golden", "size", value="tokens=3"),
    "'height' has no length": within("signature", "dims", 0, "multiple_of", value=0),
    "signature.dims.minimum is '8'": within("signature", "dims", 0, "minimum", value="8"),
    "the shape of 'image' is ": within("signature", "inputs", 0, "shape", 1, value="depth"),
    "signature.inputs.meaning is 'cat'": within("signature", "inputs", 0, "meaning", value="cat"),
    "parameters is 'x'": within("parameters", value="x"),
    "parameters is 1000": within("parameters", value=10**400),
    "flops is '1'": within("flops", value={"64": "1"}),
    "format is 'caffe'": within("format", value="caffe"),
    "batch is 'any'": within("batch", value="any"),
    "batch is -1": within("batch", value=-1),
    "versions is 2": within("versions", value={"torch": 2}),
    "verified.snr_db is None": within("verified", 0, "snr_db", value=None),
    "preprocessing.mean is 0": within("preprocessing", "mean", value=0),
    "preprocessing.size is 'fixed'": within("preprocessing", "size", value="fixed"),
    r"what\nelse is unknown": within("what\nelse", value=1),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_metadata_of_other_types_is_one_line(message, paths):
    data = json.loads(onnx_format.read(paths["onnx"]))
    data["preprocessing"] = asdict(Preprocessing())
    HOSTILE[message](data)
    with pytest.raises(EdgeVitError) as caught:
        Metadata.from_json(json.dumps(data))
    assert str(caught.value).startswith("edgevit metadata cannot be read (")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_without_what_came_later_is_read(paths):
    text = onnx_format.read(paths["onnx"])
    data = json.loads(text)
    assert Metadata.from_json(text).to_json() == text
    del data["notes"]
    for item in data["verified"]:
        del item["cosine"]
    old = Metadata.from_json(json.dumps(data))
    assert old.notes == ()
    assert old.verified[0].cosine == 1.0


DAMAGE = {
    "empty": lambda content: b"",
    "a web page": lambda content: b"<!DOCTYPE html><html><body>404 not found</body></html>" * 40,
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\n",
    "a quarter": lambda content: content[: len(content) // 4],
    "nine tenths": lambda content: content[: len(content) * 9 // 10],
    "all but a little": lambda content: content[:-40],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("form", FORMATS)
def test_files_that_are_none_get_one_line(form, damage, paths, tmp_path):
    path = copied(paths[form], tmp_path)
    file = content_of(path)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    for read in (run.open_artifact, lambda path: run.load(path, size=Size.parse("64"))):
        with pytest.raises(EdgeVitError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_weights_of_a_package_that_were_cut_short(paths, tmp_path):
    path = copied(paths["coreml"], tmp_path)
    weights = next(path.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(EdgeVitError):
        run.load(path, size=Size.parse("64"))


def test_paths_that_are_no_artifact(tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file.mlpackage").write_text("x")
    (tmp_path / "empty.mlpackage").mkdir()
    (tmp_path / "model.pt").write_text("x")
    for name in ("folder.onnx", "file.mlpackage", "empty.mlpackage", "model.pt", "missing.onnx"):
        with pytest.raises(EdgeVitError, match=name):
            run.load(tmp_path / name)


def test_an_old_package_comes_back_when_the_new_one_cannot_take_its_place(tmp_path):
    old = tmp_path / "model.mlpackage"
    old.mkdir()
    (old / "kept").touch()
    with pytest.raises(EdgeVitError, match="cannot write it"), written_beside(old):
        pass  # nothing was written, so there is nothing to rename
    assert [path.name for path in tmp_path.rglob("*")] == ["model.mlpackage", "kept"]
