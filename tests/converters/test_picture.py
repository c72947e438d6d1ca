"""Files that take pictures: what an app hands over goes in as it is, and the same classes come out of each format."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from export_models import pictures
from scipy.special import softmax
from sklearn.datasets import load_sample_image

import converters
from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.onnx import convert
from converters.picture import PictureInput, from_pictures, picture_signature, to_pictures
from converters.quiet import quiet
from converters.run import load
from converters.signature import Signature, Size, TensorSpec

SIZE = Size.parse("64x72")
UNEQUAL = Preprocessing(size="64", mean=(0.1, 0.2, 0.3), std=(0.8, 1.0, 1.3))
LABELS = tuple(f"class {number}" for number in range(7))


def photograph(name: str = "flower.jpg") -> np.ndarray:
    """(1, 64, 72, 3) uint8, RGB."""
    return load_sample_image(name)[100 : 100 + 3 * 64 : 3, 150 : 150 + 3 * 72 : 3][None].copy()


def expected(module: torch.nn.Module, picture: np.ndarray, order: str) -> np.ndarray:
    """Probabilities by the definition of preprocessing, in numpy."""
    channels = picture[..., ::-1] if order == "BGR" else picture
    x = (channels / 255.0 - np.array(UNEQUAL.mean)) / np.array(UNEQUAL.std)
    with torch.no_grad():
        logits = module(torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32)))
    return softmax(logits.numpy(), axis=-1)


@pytest.fixture(scope="module", params=["RGB", "BGR"])
def order(request):
    return request.param


@pytest.fixture(scope="module")
def picture_files(order, small, tmp_path_factory):
    """One size in every format, each with labels; means and deviations differ by channel."""
    return converters.export(
        small,
        small.signature,
        name="small",
        out=tmp_path_factory.mktemp("pictures"),
        sizes=[SIZE],
        input="image",
        sample_inputs=pictures,
        preprocessing=Preprocessing(**(vars(UNEQUAL) | {"channel_order": order})),
        labels=LABELS,
    )


def test_every_format_gives_the_same_classes_for_a_photograph(picture_files, order, small):
    picture = photograph()
    wanted = expected(small, picture, order)
    assert not np.allclose(wanted, expected(small, picture[..., ::-1], order), atol=1e-2)  # the order matters here
    for artifact in picture_files:
        session = load(artifact.path, size=SIZE)
        assert [(port.name, port.dtype, port.shape[1:]) for port in session.inputs] == [("image", "uint8", (64, 72, 3))]
        found = session.run({"image": picture})["probabilities"]
        tolerance = 1e-5 if artifact.metadata.precision == "fp32" else 1e-2
        np.testing.assert_allclose(found, wanted, atol=tolerance, err_msg=artifact.metadata.format)
        assert found[0].argsort()[:-6:-1].tolist() == wanted[0].argsort()[:-6:-1].tolist()


def test_files_say_what_they_take_and_give(picture_files):
    assert [artifact.path.name for artifact in picture_files] == [
        "small-image.onnx",
        "small-image-64x72.tflite",
        "small-image-64x72.mlpackage",
    ]
    for artifact in picture_files:
        meta = artifact.metadata
        assert meta.signature.inputs == (TensorSpec("image", ("batch", "height", "width", 3), "uint8", "image"),)
        assert meta.signature.outputs == (TensorSpec("probabilities", ("batch", 7), "float32", "probabilities"),)
        assert meta.labels == LABELS
        assert meta.golden.inputs["image"].dtype == np.uint8


def test_pictures_and_their_values_are_each_others_inverse(order):
    preprocessing = Preprocessing(**(vars(UNEQUAL) | {"channel_order": order}))
    picture = {"image": photograph("china.jpg")}
    values = from_pictures(picture, preprocessing)
    channels = picture["image"][..., ::-1] if order == "BGR" else picture["image"]
    wanted = (channels / 255.0 - np.array(UNEQUAL.mean)) / np.array(UNEQUAL.std)
    np.testing.assert_allclose(values["image"], wanted.transpose(0, 3, 1, 2), atol=1e-5)
    np.testing.assert_array_equal(to_pictures(values, preprocessing)["image"], picture["image"])


def test_pooled_maps_stay_free_of_strides_in_onnx(tmp_path):
    """Pixels lie channels last: of a pooled map torch.export made as_strided, a Gather over computed indices."""
    pooled = (torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Conv2d(8, 7, 1), torch.nn.Flatten())
    module = PictureInput(torch.nn.Sequential(*pooled), UNEQUAL, Signature.image_classifier(7)).eval()
    path = tmp_path / "x.onnx"
    with quiet():
        convert(module, module.signature, (SIZE,), path, precision="fp32", batch="dynamic", samples={})
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds == ["Cast", "Mul", "Add", "Transpose", "Conv", "ReduceMean", "Conv", "Reshape", "Softmax"]


def test_only_logits_are_softmaxed():
    class Two(torch.nn.Module):
        def forward(self, image):
            pooled = image.mean(dim=(2, 3))
            return {"features": pooled, "logits": 4 * pooled}

    outputs = (
        TensorSpec("logits", ("batch", 3), "float32", "logits"),
        TensorSpec("features", ("batch", 3), "float32", "features"),
    )
    signature = Signature(Signature.image_classifier(3).inputs, outputs)
    wrapped = PictureInput(Two(), Preprocessing(), signature)
    assert [spec.name for spec in wrapped.signature.outputs] == ["probabilities", "features"]
    probabilities, features = wrapped(torch.from_numpy(photograph()))
    np.testing.assert_allclose(features.numpy()[0], photograph().mean(axis=(0, 1, 2)) / 255, rtol=1e-5)
    np.testing.assert_allclose(probabilities.numpy(), softmax(4 * features.numpy(), -1), rtol=1e-5)


def test_a_model_of_something_else_takes_no_picture():
    tokens = Signature((TensorSpec("tokens", ("batch", 16), "int64", "tokens"),), ())
    with pytest.raises(EdgeVitError, match="is not one RGB picture"):
        picture_signature(tokens)
