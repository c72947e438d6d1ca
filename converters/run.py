"""Any artifact on arrays: ONNX Runtime, LiteRT, or the evaluator of Core ML programs, behind one `Session`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.artifact import Artifact, Metadata, format_of, readable_format
from converters.errors import EdgeVitError, first_line
from converters.signature import Size

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Port:
    """One input or output of a loaded artifact. `shape` has None where the runtime takes any length."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Session:
    """A loaded artifact at one size (at any size, where it is dynamic and none was asked for)."""

    path: Path
    runtime: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Metadata | None
    call: Callable[[Arrays], Arrays]

    @property
    def batch(self) -> int | str:
        """The number of examples that a run takes, or "dynamic"."""
        first = self.inputs[0].shape[0] if self.inputs and self.inputs[0].shape else 1
        return "dynamic" if first is None else first

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Outputs by name for arrays by name. Raises EdgeVitError for a wrong name, shape or kind of number."""
        return self.call(self.taken(inputs))

    def taken(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """The arrays as the file takes them, such as int64 as int32. Raises as `run` does."""
        wanted = {port.name for port in self.inputs}
        if wanted != set(inputs):
            raise EdgeVitError(f"{self.path}: takes {_listed(wanted)}, not {_listed(set(inputs))}")
        return {port.name: self._checked(port, np.asarray(inputs[port.name])) for port in self.inputs}

    def _checked(self, port: Port, array: np.ndarray) -> np.ndarray:
        fits = len(array.shape) == len(port.shape) and all(
            want is None or want == have for want, have in zip(port.shape, array.shape, strict=True)
        )
        if not fits:
            shape = " × ".join("any" if length is None else str(length) for length in port.shape)
            raise EdgeVitError(f"{self.path}: '{port.name}' takes {shape}, not {' × '.join(map(str, array.shape))}")
        if not np.can_cast(array.dtype, port.dtype, "same_kind"):
            raise EdgeVitError(f"{self.path}: '{port.name}' takes {port.dtype}, not {array.dtype}")
        return np.ascontiguousarray(array, port.dtype)


def open_artifact(path: Path | str) -> Artifact:
    """A file with what it says of itself, read from the format's own place for it. Loads no runtime.

    Raises EdgeVitError for a missing, foreign or damaged file, and for one without edgevit's metadata.
    """
    path = Path(path)
    text = _read_metadata(path)
    if text is None:
        raise EdgeVitError(f"{path}: carries no edgevit metadata; write it with `edgevit export`")
    return Artifact(path, _parse(path, text))


def load(path: Path | str, *, size: Size | None = None, threads: int = 1) -> Session:
    """Loads any `.onnx`, `.tflite` or `.mlpackage`, this project's or another's, to run on the CPU.

    `size` chooses among the sizes of a file that holds several; it may be left out where there is one, or where the
    file is dynamic. Raises EdgeVitError for a damaged file, a size that the file does not hold, or an operation that
    the Core ML evaluator does not know.
    """
    path = Path(path)
    form = format_of(path)
    text = _read_metadata(path)
    metadata = None if text is None else _parse(path, text)
    if metadata is not None and size is not None:
        metadata.signature.check(size)
    loader = {"onnx": _load_onnx, "tflite": _load_tflite, "coreml": _load_coreml}[form]
    return loader(path, size, threads, metadata)


def _read_metadata(path: Path) -> str | None:
    form = readable_format(path)
    try:
        if form == "onnx":
            from converters import onnx as reader
        elif form == "tflite":
            from converters import tflite as reader  # type: ignore[no-redef]
        else:
            from converters import coreml as reader  # type: ignore[no-redef]
        return reader.read(path)
    except OSError as error:
        raise EdgeVitError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(path: Path, text: str) -> Metadata:
    try:
        return Metadata.from_json(text)
    except EdgeVitError as error:
        raise EdgeVitError(f"{path}: {error}") from error


def _load_onnx(path: Path, size: Size | None, threads: int, metadata: Metadata | None) -> Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Spinning worker threads disturb whatever else runs in this process.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base class
        raise EdgeVitError(f"{path}: ONNX Runtime cannot load it ({first_line(error)})") from error

    def port(item: Any) -> Port:
        dtype = {"tensor(float)": "float32", "tensor(double)": "float64"}.get(item.type, item.type[7:-1])
        return Port(item.name, tuple(d if isinstance(d, int) else None for d in item.shape), dtype)

    outputs = tuple(port(item) for item in session.get_outputs())
    names = [item.name for item in outputs]

    def call(inputs: Arrays) -> Arrays:
        try:
            return dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:
            raise EdgeVitError(f"{path}: ONNX Runtime failed on it ({first_line(error)})") from error

    inputs = _at_size(path, tuple(port(item) for item in session.get_inputs()), size, metadata)
    return Session(path, "onnxruntime", inputs, outputs, metadata, call)


def _load_tflite(path: Path, size: Size | None, threads: int, metadata: Metadata | None) -> Session:
    from ai_edge_litert.interpreter import Interpreter

    from converters.quiet import quiet

    try:
        with quiet():  # it announces its delegate from C++
            interpreter = Interpreter(model_path=str(path), num_threads=threads)
            interpreter.allocate_tensors()
            signatures = interpreter.get_signature_list()
            if not signatures:
                raise EdgeVitError(f"{path}: names no signature, so its inputs and outputs have no names")
            key = _entry_point(path, size, list(signatures), metadata)
            runner = interpreter.get_signature_runner(key)
            inputs, outputs = _tflite_ports(runner.get_input_details()), _tflite_ports(runner.get_output_details())
    except (ValueError, RuntimeError) as error:
        raise EdgeVitError(f"{path}: LiteRT cannot load it ({first_line(error)})") from error

    def call(arrays: Arrays) -> Arrays:
        try:
            return {name: np.array(array) for name, array in runner(**arrays).items()}
        except (ValueError, RuntimeError) as error:
            raise EdgeVitError(f"{path}: LiteRT failed on it ({first_line(error)})") from error

    return Session(path, "litert", _at_size(path, inputs, size, metadata), outputs, metadata, call)


def _load_coreml(path: Path, size: Size | None, threads: int, metadata: Metadata | None) -> Session:
    """`threads` is torch's while a program runs: its many small operations gain nothing from more than one."""
    import torch

    from converters.coreml import describe
    from converters.mil import Program

    functions = describe(path)
    name = _entry_point(path, size, list(functions), metadata)
    program = Program(path)
    inputs, outputs = (
        tuple(Port(key, kind.shape, kind.dtype) for key, kind in side.items()) for side in functions[name]
    )

    def call(arrays: Arrays) -> Arrays:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return program.run(arrays, function=name)
        finally:
            torch.set_num_threads(before)

    return Session(path, "coreml", _at_size(path, inputs, size, metadata), outputs, metadata, call)


def _entry_point(path: Path, size: Size | None, names: list[str], metadata: Metadata | None) -> str:
    """The signature or function that serves `size`; the only one there is, where there is one."""
    if size is not None and size.entry_point in names:
        return size.entry_point
    if len(names) == 1 and (size is None or metadata is None or str(size) in metadata.sizes):
        return names[0]
    held = ", ".join(metadata.sizes if metadata else names)
    if size is None:
        raise EdgeVitError(f"{path}: holds several sizes ({held}); say which")
    raise EdgeVitError(f"{path}: does not hold size {size}; it holds {held}")


def _at_size(path: Path, ports: tuple[Port, ...], size: Size | None, metadata: Metadata | None) -> tuple[Port, ...]:
    """Input shapes with the runtime's free lengths filled in from `size`, the batch left as it is."""
    if size is None or metadata is None:
        return ports
    specs = {spec.name: spec for spec in metadata.signature.inputs}
    if set(specs) != {port.name for port in ports}:
        raise EdgeVitError(f"{path}: its inputs are not those that its metadata names: {_listed(set(specs))}")
    resolved = []
    for port in ports:
        spec = specs[port.name]
        lengths = list(zip(spec.shape, port.shape, spec.resolve(size), strict=True))
        if any(symbol != "batch" and have not in (None, want) for symbol, have, want in lengths):
            raise EdgeVitError(f"{path}: does not hold size {size}; it holds {', '.join(metadata.sizes)}")
        shape = tuple(have if symbol == "batch" else want for symbol, have, want in lengths)
        resolved.append(Port(port.name, shape, port.dtype))
    return tuple(resolved)


def _tflite_ports(details: dict[str, dict[str, Any]]) -> tuple[Port, ...]:
    return tuple(
        Port(name, tuple(int(d) if d >= 0 else None for d in item["shape_signature"]), np.dtype(item["dtype"]).name)
        for name, item in details.items()
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
