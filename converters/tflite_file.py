"""A TFLite file as objects and back: its flatbuffer, named metadata, and the files appended to it as a zip."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.errors import EdgeVitError

IDENTIFIER = b"TFL3"
METADATA_NAME = "EDGEVIT_METADATA"
LARGEST_APPENDED = 1 << 26  # bytes of label files and the like: a zip in an untrusted file may not unpack to more
ALIGNMENT = 16  # the schema asks it of every buffer: kernels read weights in place


@dataclass
class TFLiteFile:
    """`model` holds every table of the flatbuffer; `files` what TFLite Metadata appends to it, by name."""

    model: schema.ModelT
    files: dict[str, bytes]

    @classmethod
    def parse(cls, content: bytes, *, name: Path | str = "the converter's file") -> TFLiteFile:
        """Raises EdgeVitError, beginning with `name`, when `content` is no whole TFLite model.

        Reading every table is also what finds a file that was cut short.
        """
        if content[4:8] != IDENTIFIER:
            raise EdgeVitError(f"{name}: not a TFLite model")
        try:
            model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
            _take_in(model, content)
            return cls(model, _appended(content))
        except (struct.error, IndexError, ValueError, TypeError, OverflowError, MemoryError) as error:
            raise EdgeVitError(f"{name}: a damaged TFLite model, or one that was cut short") from error

    def metadata(self, name: str) -> bytes | None:
        """The `Model.metadata` entry of that name. Raises IndexError, TypeError or ValueError when it is damaged."""
        entry = self._entry(name)
        return None if entry is None else bytes(self.model.buffers[entry.buffer].data)

    def set_metadata(self, name: str, data: bytes) -> None:
        """Puts `data` into a buffer of its own, under `name` in `Model.metadata`."""
        entry = self._entry(name)
        if entry is None:
            entry = schema.MetadataT()
            entry.name, entry.buffer = name, len(self.model.buffers)
            self.model.buffers.append(schema.BufferT())
            self.model.metadata = [*(self.model.metadata or []), entry]
        self.model.buffers[entry.buffer].data = np.frombuffer(data, np.uint8)

    def to_bytes(self) -> bytes:
        builder = _AlignedBuilder(1 << 20)
        builder.Finish(self.model.Pack(builder), file_identifier=IDENTIFIER)
        content = bytes(builder.Output())
        if not self.files:
            return content
        stream = io.BytesIO(content)
        with zipfile.ZipFile(stream, "a", zipfile.ZIP_STORED) as archive:  # readers know no compression here
            for name, data in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), data)  # a fixed date: the same model, the same bytes
        return stream.getvalue()

    def _entry(self, name: str) -> schema.MetadataT | None:
        return next((item for item in self.model.metadata or [] if text(item.name) == name), None)


def text(value: bytes | str | None) -> str:
    """A string of the flatbuffer, which its objects hold as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _take_in(model: schema.ModelT, content: bytes) -> None:
    """Buffers that lie behind the flatbuffer (quantisers put large ones there) become part of it: packing moves it."""
    for buffer in model.buffers or []:
        if buffer.offset > 1:
            data = np.frombuffer(content, np.uint8, count=buffer.size, offset=buffer.offset)
            buffer.data, buffer.offset, buffer.size = data, 0, 0


def _appended(content: bytes) -> dict[str, bytes]:
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(item.file_size for item in archive.infolist()) > LARGEST_APPENDED:
                raise ValueError(f"more than {LARGEST_APPENDED} bytes are appended")
            return {name: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile:  # weights may look like the end of a zip
        return {}
    except (RuntimeError, zlib.error) as error:  # encrypted, or compressed as Python does not know
        raise ValueError("what is appended cannot be read") from error


class _AlignedBuilder(flatbuffers.Builder):
    """Aligns every array; flatbuffers' own would place a buffer of bytes anywhere."""

    def CreateNumpyVector(self, x: np.ndarray) -> int:  # noqa: N802 - the base class's name
        self.StartVector(x.itemsize, x.size, ALIGNMENT)
        data = np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).tobytes()
        self.head -= len(data)
        self.Bytes[self.head : self.head + len(data)] = data
        return self.EndVector()
