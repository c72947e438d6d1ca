"""A small folder of pictures to train on in seconds: IDX files, as MNIST has them, of some of scikit-learn's digits."""

import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits


def write_idx(path, array):
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """96 training and 40 held-out pictures of 8 × 8, 10 classes."""
    folder = tmp_path_factory.mktemp("few") / "digits"
    folder.mkdir()
    digits = load_digits()
    pictures, labels = np.round(digits.images * 255 / 16), digits.target
    for prefix, part in (("train", slice(0, 96)), ("t10k", slice(96, 136))):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", pictures[part])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels[part])
    return folder
