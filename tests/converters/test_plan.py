"""Which files an export writes, and the sizes at which a dynamic one is proven besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from converters.errors import EdgeVitError
from converters.plan import check_arguments, plans, unlisted
from converters.signature import Dim, Signature, Size, TensorSpec

SIZES = Size.parse_list("160,192x256")
FIXED = Size(())


def files(form: str, sizes=SIZES, precision=None, target="ios16", **options) -> list[str]:
    return [plan.file for plan in plans("m", form, sizes, precision, "dynamic", target, **options)]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"form": "onnx"}, ["m.onnx"]),
        ({"form": "onnx", "precision": "fp16", "static": True}, ["m-fp16-160.onnx", "m-fp16-192x256.onnx"]),
        ({"form": "tflite"}, ["m.tflite"]),
        ({"form": "tflite", "picture": True}, ["m-image-160.tflite", "m-image-192x256.tflite"]),
        ({"form": "onnx", "picture": True}, ["m-image.onnx"]),
        ({"form": "coreml", "precision": "fp16"}, ["m-160.mlpackage", "m-192x256.mlpackage"]),
        ({"form": "coreml", "precision": "fp32", "target": "ios18"}, ["m-fp32.mlpackage"]),
        ({"form": "coreml", "target": "ios18", "static": True}, ["m-160.mlpackage", "m-192x256.mlpackage"]),
        ({"form": "coreml", "sizes": (FIXED,)}, ["m.mlpackage"]),
        ({"form": "onnx", "sizes": (FIXED,), "static": True}, ["m.onnx"]),
    ],
)
def test_names_of_files(options, names):
    assert files(**options) == names


def test_only_onnx_files_have_a_dynamic_batch():
    batches = {
        form: {plan.batch for plan in plans("m", form, SIZES, None, "dynamic", "ios16")}
        for form in ("onnx", "tflite", "coreml")
    }
    assert batches == {"onnx": {"dynamic"}, "tflite": {1}, "coreml": {1}}


def test_a_dynamic_file_is_proven_at_an_equal_and_an_unequal_size_that_nobody_listed():
    signature = Signature.image_classifier(10)
    found = unlisted(signature, Size.parse_list("256,160,192"))
    assert [str(size) for size in found] == ["224", "160x192"]
    for size in found:
        signature.check(size)
    assert unlisted(signature, Size.parse_list("160,160x192")) == (Size.parse("192"),)


def test_sizes_that_a_signature_does_not_allow_are_not_tried():
    signature = Signature.image_classifier(10)
    fixed = Signature(signature.inputs, signature.outputs, (Dim("height", 64, 96, 32), Dim("width", 64, 96, 32)))
    assert unlisted(fixed, Size.parse_list("64,96")) == (Size.parse("64x96"),)
    tokens = Signature((TensorSpec("tokens", ("batch", "tokens"), "int64", "tokens"),), (), (Dim("tokens", 1, 512),))
    assert unlisted(tokens, Size.parse_list("tokens=8,tokens=9")) == (Size.parse("tokens=10"),)
    assert unlisted(signature, Size.parse_list("64")) == ()


def test_labels_are_as_many_as_classes():
    signature = Signature.image_classifier(3)
    with pytest.raises(EdgeVitError, match="2 labels for a model of 3 classes"):
        check_arguments(signature, ["onnx"], SIZES, None, 1, "ios16", ["a", "b"])
    check_arguments(signature, ["onnx"], SIZES, None, 1, "ios16", ["a", "b", "c"])
    no_classes = replace(signature, outputs=(TensorSpec("map", ("batch", 3)),))
    check_arguments(no_classes, ["onnx"], SIZES, None, 1, "ios16")
    with pytest.raises(EdgeVitError, match="no output of the model is a classifier's logits"):
        check_arguments(no_classes, ["onnx"], SIZES, None, 1, "ios16", ["a", "b", "c"])


def test_a_model_with_fixed_shapes_takes_no_size():
    signature = Signature((TensorSpec("x", ("batch", 7)),), (TensorSpec("y", ("batch", 7)),))
    signature.check(Size.parse("fixed"))
    assert str(FIXED) == "fixed"
    with pytest.raises(EdgeVitError, match="size 64: this model's shapes are fixed; leave the size out"):
        signature.check(Size.parse("64"))


def test_the_default_size_comes_first():
    sizes = Size.parse_list("160,256,192")
    for form, target in (("tflite", "ios16"), ("coreml", "ios18")):
        [plan] = plans("m", form, sizes, None, 1, target, default="256")
        assert plan.sizes == Size.parse_list("256,160,192")
    [plan] = plans("m", "tflite", sizes, None, 1, "ios16", default="224")
    assert plan.sizes == sizes
