"""An exported file that carries its own metadata, inside the format's own place for it, so that one file travels."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from converters.errors import EdgeVitError, first_line
from converters.signature import Signature, Size
from converters.typed import typed

FORMATS = {".onnx": "onnx", ".tflite": "tflite", ".mlpackage": "coreml"}
SUFFIXES = {fmt: suffix for suffix, fmt in FORMATS.items()}
RUNTIMES = {"onnx": "onnxruntime", "tflite": "litert", "coreml": "coreml"}
DEFAULT_PRECISION = {"onnx": "fp32", "tflite": "fp32", "coreml": "fp16"}
METADATA_KEY = "edgevit"
MAX_ARRAY_BYTES = 1 << 28  # a golden array in an untrusted file may not unpack to more than this


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the model's input (N, C, H, W) float32.

    The shorter side is resized to size / crop_fraction, the centre size × size is cut out, channels are put in
    `channel_order`, and each value v in 0…255 becomes (v × scale − mean) / std. `size` is the training default.
    """

    size: str = "256"
    crop_fraction: float = 1.0
    interpolation: str = "bilinear"  # bilinear | bicubic | nearest
    channel_order: str = "RGB"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        """Raises ValueError for a value of another type, KeyError without mean and std."""
        found: Preprocessing = typed(cls, data | {"mean": data["mean"], "std": data["std"]})
        return found


@dataclass(frozen=True)
class Verified:
    """How closely one output, at one size, agreed with the module. `max_abs_over_std` is max |a − b| / std(b)."""

    size: str
    output: str
    max_abs_over_std: float
    snr_db: float
    output_std: float
    top1_agreement: float | None = None
    cosine: float = 1.0  # of the angle between the two outputs, both taken as one long vector


@dataclass(frozen=True)
class Golden:
    """One input and the output that the module gave for it; a device that returns another output is wrong."""

    size: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "inputs": {name: _pack(array) for name, array in self.inputs.items()},
            "outputs": {name: _pack(array) for name, array in self.outputs.items()},
        }


@dataclass(frozen=True)
class Metadata:
    """What an artifact says of itself."""

    model: str
    format: str
    precision: str
    batch: int | str  # an int, or "dynamic"
    sizes: tuple[str, ...]
    signature: Signature
    source_sha256: str
    versions: dict[str, str]
    preprocessing: Preprocessing | None = None
    labels: tuple[str, ...] = ()
    target: str | None = None  # Core ML deployment target, such as "ios16"
    flops: dict[str, int] = field(default_factory=dict)  # by size, batch 1; a multiply-add counts as two
    parameters: int = 0
    verified: tuple[Verified, ...] = ()
    golden: Golden | None = None
    notes: tuple[str, ...] = ()  # what the converter did that its user should know

    def to_json(self) -> str:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["signature"] = self.signature.to_json()
        data["preprocessing"] = self.preprocessing and asdict(self.preprocessing)
        data["verified"] = [asdict(item) for item in self.verified]
        data["golden"] = self.golden and self.golden.to_json()
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Metadata:
        """Raises EdgeVitError when `text` is not this version's metadata. Executes nothing."""
        try:
            meta: Metadata = typed(cls, json.loads(text), {np.ndarray: _unpack})
            meta._check()
            return meta
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
            raise EdgeVitError(f"edgevit metadata cannot be read ({error}); export the file again") from error

    def _check(self) -> None:
        """Raises ValueError for what no export writes and what would fail later: sizes, dimensions, arrays."""
        if self.format not in RUNTIMES:
            raise ValueError(f"format is {self.format[:60]!r}")
        if self.batch != "dynamic" and (isinstance(self.batch, str) or self.batch < 1):
            raise ValueError(f"batch is {repr(self.batch)[:60]}")
        for dim in self.signature.dims:
            if min(dim.minimum, dim.multiple_of) < 1 or (dim.maximum is not None and dim.maximum < dim.minimum):
                raise ValueError(f"signature.dims: {dim.name[:60]!r} has no length")
        known = {"batch", *(dim.name for dim in self.signature.dims)}
        for spec in (*self.signature.inputs, *self.signature.outputs):
            if any(length not in known if isinstance(length, str) else length < 0 for length in spec.shape):
                raise ValueError(f"signature: the shape of {spec.name[:60]!r} is {repr(spec.shape)[:60]}")
            np.dtype(spec.dtype)
        sizes = [*self.sizes, *self.flops, *([self.golden.size] if self.golden else [])]
        try:
            for size in sizes:
                self.signature.check(Size.parse(size))
            if self.preprocessing is not None and "height" not in dict(Size.parse(self.preprocessing.size).dims):
                raise ValueError(f"preprocessing.size is {self.preprocessing.size[:60]!r}")
        except EdgeVitError as error:
            raise ValueError(first_line(error)[:160]) from error


@dataclass(frozen=True)
class Artifact:
    """A file (or .mlpackage folder) on disk and what it says of itself."""

    path: Path
    metadata: Metadata

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(Size.parse(size) for size in self.metadata.sizes)

    @property
    def runtime(self) -> str:
        return RUNTIMES[self.metadata.format]


def format_of(path: Path) -> str:
    """`onnx`, `tflite` or `coreml`, from the suffix. Raises EdgeVitError for a missing path or another suffix."""
    if not path.exists():
        raise EdgeVitError(f"{path}: no such file")
    try:
        return FORMATS[path.suffix]
    except KeyError:
        raise EdgeVitError(f"{path}: not an artifact; one ends in {', '.join(FORMATS)}") from None


def readable_format(path: Path) -> str:
    """As `format_of`; raises EdgeVitError, too, for a file where the format is a folder, and the other way round."""
    form = format_of(path)
    if path.is_dir() != (form == "coreml"):
        raise EdgeVitError(f"{path}: a {form} artifact is a {'folder' if form == 'coreml' else 'file'}")
    return form


def artifact_files(path: Path) -> list[Path]:
    """Every file of an artifact: the file itself and an ONNX `.data` sidecar, or all files of a folder."""
    if path.is_dir():
        return sorted(item for item in path.rglob("*") if item.is_file())
    sidecar = path.with_name(path.name + ".data")
    return [path, sidecar] if sidecar.exists() else [path]


def size_bytes(path: Path) -> int:
    return sum(item.stat().st_size for item in artifact_files(path))


def artifact_sha256(path: Path) -> str:
    """SHA-256 of a file; of a folder or a file with a sidecar, over each file's relative name and content."""
    files = artifact_files(path)
    digest = hashlib.sha256()
    for item in files:
        if path.is_dir() or len(files) > 1:
            digest.update(str(item.relative_to(path if path.is_dir() else path.parent)).encode() + b"\0")
        with item.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Gives a path of the same suffix in a temporary folder beside `path`; on success it replaces `path`.

    After an exception, an interrupt or a full disk nothing is left under `path` that was not there before.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise EdgeVitError(f"{path.parent}: cannot write there ({error.strerror})") from error
    try:
        draft = folder / path.name
        yield draft
        if path.is_dir():  # a folder cannot be replaced in one step: it comes back should the second one fail
            path.rename(folder / "replaced")
            try:
                draft.rename(path)
            except OSError:
                (folder / "replaced").rename(path)
                raise
        else:
            os.replace(draft, path)
    except OSError as error:
        raise EdgeVitError(f"{path}: cannot write it ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pack(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "zlib": data}


def _unpack(item: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(item["dtype"])
    if dtype.kind not in "fiub":
        raise ValueError(f"array of dtype {dtype}")
    expected = int(np.prod(item["shape"], dtype=np.int64)) * dtype.itemsize
    if not 0 <= expected <= MAX_ARRAY_BYTES:
        raise ValueError(f"array of {expected} bytes")
    raw = zlib.decompressobj().decompress(base64.b64decode(item["zlib"]), expected + 1)
    if len(raw) != expected:
        raise ValueError(f"array of {len(raw)} bytes where its shape says {expected}")
    return np.frombuffer(raw, dtype).reshape(item["shape"]).copy()
