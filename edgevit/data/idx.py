"""IDX, the format of MNIST and its successors: a header of big-endian sizes, then bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from converters.errors import EdgeVitError

STEMS = {  # split → images, labels
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
UNSIGNED_BYTE = 8
MAX_BYTES = 1 << 32  # what an untrusted header may make us read


def holds_idx(folder: Path) -> bool:
    """Whether `folder` has images of either split as IDX."""
    return any(_find(folder, images) is not None for images, _ in STEMS.values())


def read_idx_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W) uint8 and labels (N,) uint8 of `split`, "train" or "test".

    Raises EdgeVitError for files that are missing, truncated or otherwise not IDX, or that do not belong together.
    """
    arrays = []
    for stem, ndim in zip(STEMS[split], (3, 1), strict=True):
        path = _find(folder, stem)
        if path is None:
            raise EdgeVitError(f"{folder}: {stem} is missing (plain or .gz)")
        arrays.append(read_idx(path, ndim))
    images, labels = arrays
    if len(images) != len(labels):
        raise EdgeVitError(f"{folder}: {len(images)} {split} images but {len(labels)} labels; fetch the files again")
    return images, labels


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """An IDX file of unsigned bytes with `ndim` dimensions → uint8 array. Raises EdgeVitError when it is not one."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return _read(cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw, path, ndim)
    except (OSError, EOFError, zlib.error) as error:  # a gzip file that is cut off or damaged
        raise EdgeVitError(f"{path}: cannot be read ({error}); fetch it again") from error


def _read(stream: BinaryIO, path: Path, ndim: int) -> np.ndarray:
    header = stream.read(4 + 4 * ndim)
    if len(header) < 4 + 4 * ndim or header[:4] != bytes((0, 0, UNSIGNED_BYTE, ndim)):
        raise EdgeVitError(f"{path}: not an IDX file of unsigned bytes with {ndim} dimension(s)")
    shape = struct.unpack(f">{ndim}I", header[4:])
    expected = math.prod(shape)
    if not 0 < expected <= MAX_BYTES:
        raise EdgeVitError(f"{path}: its header says {' x '.join(map(str, shape))} bytes, which cannot be")
    data = stream.read(expected + 1)
    if len(data) != expected:
        relation = "more" if len(data) > expected else f"{len(data)}"
        raise EdgeVitError(f"{path}: its header says {expected} bytes and it holds {relation}; fetch it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _find(folder: Path, stem: str) -> Path | None:
    candidates = (folder / name for name in (stem, stem + ".gz"))
    return next((path for path in candidates if path.is_file()), None)
