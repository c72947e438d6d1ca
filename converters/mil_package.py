"""What a saved .mlpackage holds: its specification, the declared types of its values, and its constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
from coremltools.libmilstoragepython import _BlobStorageReader as BlobReader  # private, and tied to coremltools 9
from coremltools.proto import MIL_pb2

from converters.errors import EdgeVitError

# MIL's element types that the evaluator knows: numpy's names, "str", and numbers of fewer bits than a byte.
DTYPES = {
    MIL_pb2.FLOAT16: "float16",
    MIL_pb2.FLOAT32: "float32",
    MIL_pb2.INT4: "int4",
    MIL_pb2.INT8: "int8",
    MIL_pb2.INT16: "int16",
    MIL_pb2.INT32: "int32",
    MIL_pb2.INT64: "int64",
    MIL_pb2.UINT1: "uint1",
    MIL_pb2.UINT2: "uint2",
    MIL_pb2.UINT3: "uint3",
    MIL_pb2.UINT4: "uint4",
    MIL_pb2.UINT6: "uint6",
    MIL_pb2.UINT8: "uint8",
    MIL_pb2.UINT16: "uint16",
    MIL_pb2.UINT32: "uint32",
    MIL_pb2.BOOL: "bool",
    MIL_pb2.STRING: "str",
}
# How values of those types are held while a program runs; the others are held as they are.
HELD = {
    "float16": "float32",
    "int4": "int8",
    **{f"uint{bits}": "uint8" for bits in (1, 2, 3, 4, 6)},
    "uint16": "int32",  # torch computes hardly anything on unsigned numbers
    "uint32": "int64",
}
BLOB_NAMES = {"float16": "fp16", "float32": "float"}  # where the blob reader's names differ from numpy's
Constant = np.ndarray | str | list[str]  # arrays are of the types in HELD


@dataclass(frozen=True)
class ValueType:
    """Shape (None: any size) and numpy dtype name of one value."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('?' if size is None else str(size) for size in self.shape)})"

    @property
    def held(self) -> ValueType:
        """The type that a value of this type has while a program runs."""
        return ValueType(self.shape, HELD.get(self.dtype, self.dtype))

    def matches(self, other: ValueType) -> bool:
        """Whether a value of type `other`, whose sizes are all known, may stand where this type is declared."""
        sizes = zip(self.shape, other.shape, strict=False)
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(declared in (None, found) for declared, found in sizes)
        )


def value_type(named: Any, where: str) -> ValueType:
    """The declared type of a named value. Raises EdgeVitError for one that is no tensor of a known element type."""
    return _tensor_type(named.type, f"{where}: {named.name!r}")


def read_spec(path: Path) -> Any:
    """The Model protobuf of a .mlpackage. Raises EdgeVitError when it is missing, foreign, or not an ML Program."""
    if not path.exists():
        raise EdgeVitError(f"{path}: no such file")
    try:
        spec = coremltools.utils.load_spec(str(path))
    except Exception as error:  # the loaders raise bare Exception, RuntimeError, OSError and protobuf's own
        raise EdgeVitError(f"{path}: not a readable .mlpackage ({str(error).splitlines()[0]})") from error
    if spec.WhichOneof("Type") != "mlProgram" or not spec.mlProgram.functions:
        raise EdgeVitError(f"{path}: holds {spec.WhichOneof('Type') or 'nothing known'}, not an ML Program")
    return spec


def class_labels(value: Any) -> list[str]:
    """The labels that stand in a `classify` op, in the order of its probabilities; numbers as text."""
    tensors = (item.immediateValue.tensor for item in value.immediateValue.list.values)
    return [str(label) for item in tensors for label in (item.strings.values or item.longInts.values)]


class Weights:
    """Reads constants: from the protobuf itself, or from the package's blob files, each blob once."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "Data" / "com.apple.CoreML" / "weights"
        self._readers: dict[str, Any] = {}
        self._blobs: dict[tuple[str, int, str], np.ndarray] = {}

    def constant(self, value: Any, label: str) -> Constant:
        """The content of a protobuf Value. Raises EdgeVitError, which begins with `label`, when it cannot be read."""
        declared = _tensor_type(value.type, label)
        try:
            if value.WhichOneof("value") == "blobFileValue":
                array = self._blob(value.blobFileValue, declared.dtype)
            elif declared.dtype == "str":
                texts = list(value.immediateValue.tensor.strings.values)
                return texts if declared.shape else texts[0]
            else:
                array = _immediate(value.immediateValue.tensor, declared)
            return array.reshape([size or 0 for size in declared.shape])
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise EdgeVitError(f"{label}: constant of {declared} cannot be read ({reason}); export it again") from error

    def _blob(self, blob: Any, dtype: str) -> np.ndarray:
        file = Path(blob.fileName).name
        key = (file, blob.offset, dtype)
        if key not in self._blobs:
            if file not in self._readers:
                self._readers[file] = BlobReader(str(self.folder / file))
            array = getattr(self._readers[file], f"read_{BLOB_NAMES.get(dtype, dtype)}_data")(blob.offset)
            # The reader gives the bits of fp16.
            array = array.view("float16") if dtype == "float16" else np.array(array)
            self._blobs[key] = array.astype(HELD.get(dtype, dtype))
        return self._blobs[key]


def _immediate(tensor: Any, declared: ValueType) -> np.ndarray:
    """A tensor that stands in the protobuf: a list of numbers, or bytes for the types that have no list."""
    kind, held = tensor.WhichOneof("value"), declared.held.dtype
    values = getattr(tensor, kind).values if kind else []
    if not isinstance(values, bytes):
        return np.array(values, held)
    if bits := _bits(declared.dtype):
        count = int(np.prod([size or 0 for size in declared.shape], dtype=np.int64))
        places = np.unpackbits(np.frombuffer(values, np.uint8), bitorder="little")[: count * bits].reshape(count, bits)
        array = (places.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(1)
        return np.where(array >= 8, array - 16, array).astype(held) if declared.dtype == "int4" else array.astype(held)
    return np.frombuffer(values, declared.dtype).astype(held)


def _bits(dtype: str) -> int:
    """Bits of a number that several of share a byte, 0 for the others."""
    return int(dtype[-1]) if dtype in ("int4", "uint1", "uint2", "uint3", "uint4", "uint6") else 0


def _tensor_type(type_: Any, label: str) -> ValueType:
    if type_.WhichOneof("type") == "stateType":
        type_ = type_.stateType.wrappedType
    kind, tensor = type_.WhichOneof("type"), type_.tensorType
    if kind != "tensorType" or tensor.dataType not in DTYPES:
        element = MIL_pb2.DataType.Name(tensor.dataType) if kind == "tensorType" else kind
        raise EdgeVitError(f"{label}: values of type {element} are not supported")
    sizes = (item.constant.size if item.WhichOneof("dimension") == "constant" else None for item in tensor.dimensions)
    return ValueType(tuple(sizes), DTYPES[tensor.dataType])
