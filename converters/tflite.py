"""TFLite: one file with one signature per size, weights stored once. Runs in LiteRT."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from converters.errors import EdgeVitError
from converters.signature import Signature, Size
from converters.wrap import Named, zero_inputs

METADATA_NAME = "EDGEVIT_METADATA"
IDENTIFIER = b"TFL3"
ALIGNMENT = 16  # the schema asks it of every buffer: kernels read weights in place
CONVERTER_PACKAGES = ("litert-torch", "litert-converter")
RUNTIME_PACKAGE = "ai-edge-litert"


def convert(
    module: nn.Module,
    signature: Signature,
    sizes: Sequence[Size],
    draft: Path,
    *,
    precision: str,
    batch: int | str,
    samples: Mapping[Size, Mapping[str, np.ndarray]],
    target: str | None = None,
    labels: Sequence[str] = (),
    debug_info: bool = False,
) -> list[str]:
    """Writes `draft` with a signature named `Size.entry_point` for each size; the batch is fixed."""
    import litert_torch

    if precision != "fp32":
        raise EdgeVitError(f"tflite: precision '{precision}' is not offered yet; fp32 is")
    named = Named(module, signature, as_dict=True).eval()
    converter: Any = litert_torch
    for size in sizes:
        example = zero_inputs(signature, size, 1 if batch == "dynamic" else int(batch))
        converter = converter.signature(size.entry_point, named, sample_kwargs=example)
    content = converter.convert().model_content()
    draft.write_bytes(content)  # its own export() ends the process when the disk is full
    return []


def embed(draft: Path, text: str) -> None:
    """Puts metadata into `Model.metadata` under EDGEVIT_METADATA, in a buffer of its own, uncompressed UTF-8."""
    model = _unpack(draft)
    data = np.frombuffer(text.encode(), np.uint8)
    entry = next((item for item in model.metadata or [] if _text(item.name) == METADATA_NAME), None)
    if entry is None:
        entry = schema.MetadataT()
        entry.name, entry.buffer = METADATA_NAME, len(model.buffers)
        model.buffers.append(schema.BufferT())
        model.metadata = [*(model.metadata or []), entry]
    model.buffers[entry.buffer].data = data
    builder = _AlignedBuilder(draft.stat().st_size + len(data))
    builder.Finish(model.Pack(builder), file_identifier=IDENTIFIER)
    draft.write_bytes(builder.Output())


def read(path: Path) -> str | None:
    """The metadata of a file, None where it has none. Raises EdgeVitError when it is no whole TFLite model."""
    model = _unpack(path)
    try:
        for item in model.metadata or []:
            if _text(item.name) == METADATA_NAME:
                return bytes(model.buffers[item.buffer].data).decode()
    except (IndexError, TypeError, ValueError) as error:
        raise EdgeVitError(f"{path}: its metadata is damaged") from error
    return None


class _AlignedBuilder(flatbuffers.Builder):
    """Aligns every array; flatbuffers' own would place a buffer of bytes anywhere."""

    def CreateNumpyVector(self, x: np.ndarray) -> int:  # noqa: N802 - the base class's name
        self.StartVector(x.itemsize, x.size, ALIGNMENT)
        data = np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).tobytes()
        self.head -= len(data)
        self.Bytes[self.head : self.head + len(data)] = data
        return self.EndVector()


def _unpack(path: Path) -> schema.ModelT:
    """Every table of the file as objects. Reading them all is also what finds a file that was cut short."""
    content = path.read_bytes()
    if content[4:8] != IDENTIFIER:
        raise EdgeVitError(f"{path}: not a TFLite model")
    try:
        return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    except (struct.error, IndexError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise EdgeVitError(f"{path}: a damaged TFLite model, or one that was cut short") from error


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
