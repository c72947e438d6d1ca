"""What a model file holds, read without running it: functions, their nodes and values, weights, and files on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from converters.artifact import readable_format
from converters.errors import EdgeVitError

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Value:
    """A tensor. `shape` has None for a length that is not fixed, and is None itself where the rank is not known."""

    name: str
    shape: Shape | None
    dtype: str  # numpy's name, or the format's own where numpy has none ("bfloat16", "int4", "string")
    constant: bool = False
    note: str = ""  # "image RGB", "enumerated shapes": what the format says beyond shape and dtype


@dataclass(frozen=True)
class Node:
    """One operation. `layer` is the PyTorch module's path where names in the file carry it, else ""."""

    type: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    layer: str = ""

    @property
    def label(self) -> str:
        return self.layer or self.name


@dataclass(frozen=True)
class Function:
    """A graph, a signature or a function; `nodes` holds those of nested blocks too, in the file's order."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    states: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Weight:
    """A stored constant; each is listed once, however many functions share it."""

    name: str
    dtype: str
    count: int
    compression: str = ""  # such as "int8 per channel", where fewer bits stand for a float


@dataclass(frozen=True)
class Contents:
    """`metadata` is what the file says of itself, by key; edgevit's own JSON is among it, under `artifact_text`."""

    path: Path
    format: str
    producer: str
    functions: tuple[Function, ...]
    weights: tuple[Weight, ...]
    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()  # weight files that the model names and that are not there, or may not be read
    artifact_text: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    target: str = ""  # "opset 18", "specification 7": the oldest runtime that it needs

    @property
    def nodes(self) -> Iterator[Node]:
        return (node for function in self.functions for node in function.nodes)

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def read_contents(path: Path | str) -> Contents:
    """Reads any `.onnx`, `.tflite` or `.mlpackage`, this project's or another's. Runs nothing and writes nothing.

    Raises EdgeVitError for a file that is missing, foreign, empty or cut short.
    """
    path = Path(path)
    form = readable_format(path)
    try:
        if form == "onnx":
            from converters.contents_onnx import read
        elif form == "tflite":
            from converters.contents_tflite import read
        else:
            from converters.contents_coreml import read
        return read(path)
    except OSError as error:
        raise EdgeVitError(f"{path}: cannot be read ({error.strerror or error})") from error
