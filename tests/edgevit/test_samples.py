"""Sample inputs: the right shapes, realistic values, and different for each example."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Dim, Signature, Size, TensorSpec
from edgevit.data.images import evaluation_transform, photographs
from edgevit.export import default_sizes
from edgevit.samples import sample_inputs
from edgevit.sources import Source


def source(*inputs: TensorSpec, examples=None, preprocessing=None, dims=()) -> Source:
    batched = all(spec.shape[:1] == ("batch",) for spec in inputs)
    output = TensorSpec("output", ("batch", 2) if batched else (2,))
    return Source(
        torch.nn.Identity(), "any", Signature(inputs, (output,), dims), preprocessing, (), "", examples=examples
    )


def different(array: np.ndarray) -> bool:
    return len({row.tobytes() for row in array}) == len(array)


def test_pictures_are_photographs_at_any_size():
    preprocessing = Preprocessing(size="64", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    spec = TensorSpec("image", ("batch", 3, "height", "width"), "float32", "image")
    of = source(spec, preprocessing=preprocessing, dims=(Dim("height"), Dim("width")))
    size = Size.parse("48x64")
    found = sample_inputs(of)(size, 5)["image"]
    assert found.shape == (5, 3, 48, 64)
    assert different(found)
    np.testing.assert_array_equal(found[0], evaluation_transform(preprocessing, size)(photographs()[0]).numpy())
    assert default_sizes(of) == (Size.parse("64"),)
    fixed = source(TensorSpec("image", ("batch", 3, 32, 32), "float32", "image"))
    assert sample_inputs(fixed)(Size(()), 2)["image"].shape == (2, 3, 32, 32)
    assert default_sizes(fixed) == (Size(()),)


def test_tokens_masks_and_other_numbers_are_like_the_examples():
    generator = np.random.default_rng(3)
    examples = {
        "tokens": generator.integers(5, 50, (2, 16)),
        "mask": np.ones((2, 16), np.int64),
        "padding": np.zeros((2, 16), bool),
        "values": generator.normal(7, 2, (2, 16, 3)).astype(np.float32),
        "index": np.array([[4], [9]]),
    }
    of = source(
        TensorSpec("tokens", ("batch", "tokens"), "int64", "tokens"),
        TensorSpec("mask", ("batch", "tokens"), "int64", "mask"),
        TensorSpec("padding", ("batch", "tokens"), "bool", "mask"),
        TensorSpec("values", ("batch", "tokens", 3)),
        TensorSpec("index", ("batch", 1), "int64"),
        examples=examples,
        dims=(Dim("tokens"),),
    )
    assert default_sizes(of) == (Size.parse("tokens=16"),)
    for length in (10, 16, 24):
        found = sample_inputs(of)(Size.parse(f"tokens={length}"), 4)
        assert {key: (array.dtype, array.shape[1:]) for key, array in found.items()} == {
            "tokens": (np.int64, (length,)),
            "mask": (np.int64, (length,)),
            "padding": (bool, (length,)),
            "values": (np.float32, (length, 3)),
            "index": (np.int64, (1,)),
        }
        assert different(found["tokens"])
        assert found["tokens"].min() >= examples["tokens"].min()
        assert found["tokens"].max() <= examples["tokens"].max()
        assert (found["mask"].sum(1) >= length // 2).all()
        assert (np.diff(found["mask"], axis=1) <= 0).all()  # a beginning
        assert not found["padding"].any()
        assert different(found["values"])
        assert abs(found["values"].mean() - 7) < 1.5
        assert found["index"].ravel().tolist() == [4, 9, 4, 9]
    again = sample_inputs(of)(Size.parse("tokens=24"), 4)
    assert all((again[key] == array).all() for key, array in found.items())


def test_without_a_batch_dimension_examples_are_stacked():
    of = source(TensorSpec("matrix", (3, 4)), examples={"matrix": np.eye(3, 4, dtype=np.float32)})
    found = sample_inputs(of)(Size(()), 3)["matrix"]
    assert found.shape == (3, 3, 4)
    assert different(found)


def test_an_input_without_example_is_one_line():
    with pytest.raises(EdgeVitError, match=r"^any: there is no example of its input 'values'$"):
        sample_inputs(source(TensorSpec("values", ("batch", 3))))(Size(()), 1)
