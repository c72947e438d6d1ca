"""A saved Core ML program, executed with torch: coremltools converts and saves on Linux but cannot predict there.

`Program(path)` reads the .mlpackage's protobuf and weights and prepares each function as a list of torch calls. It
checks the program and its weights, not Apple's hardware. fp16 values are computed in fp32 and each op's result is
rounded to fp16; hardware may keep more or fewer bits inside and between ops. docs/coreml-evaluator.md says more.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
import torch
from coremltools.libmilstoragepython import _BlobStorageReader as BlobReader  # private, and tied to coremltools 9
from coremltools.proto import MIL_pb2
from torch import Tensor

from converters.errors import EdgeVitError
from converters.mil_ops import OPS

# MIL's element types that the evaluator knows, as numpy names them, and how the blob reader reads each.
DTYPES = {
    MIL_pb2.FLOAT16: "float16",
    MIL_pb2.FLOAT32: "float32",
    MIL_pb2.INT8: "int8",
    MIL_pb2.INT16: "int16",
    MIL_pb2.INT32: "int32",
    MIL_pb2.UINT8: "uint8",
    MIL_pb2.UINT16: "uint16",
    MIL_pb2.BOOL: "bool",
    MIL_pb2.STRING: "str",
}
BLOB_NAMES = {"float16": "fp16", "float32": "float"}
Constant = np.ndarray | str | list[str]  # fp16 constants are held as fp32 arrays


@dataclass(frozen=True)
class ValueType:
    """Shape (None: any size) and numpy dtype name of one value."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('?' if size is None else str(size) for size in self.shape)})"


class Program:
    """An ML Program on disk (.mlpackage), read once: afterwards the folder may be renamed or removed.

    Raises EdgeVitError when `path` is missing, foreign or truncated, or uses ops or arguments that the evaluator lacks;
    all missing ops are named at once.
    """

    def __init__(self, path: Path) -> None:
        spec = _read_spec(path)
        program = spec.mlProgram
        self.path = path
        self.metadata: dict[str, str] = dict(spec.description.metadata.userDefined)
        self.functions: list[str] = list(program.functions)
        self.default_function: str = spec.description.defaultFunctionName or "main"
        if self.default_function not in self.functions:
            self.default_function = self.functions[0]
        blocks = {name: item.block_specializations[item.opset] for name, item in program.functions.items()}
        _check_ops(path, blocks.values())
        weights = _Weights(path)
        self._functions = {
            name: _Function(f"{path}: function {name!r}", item.inputs, blocks[name], weights)
            for name, item in program.functions.items()
        }

    def inputs(self, function: str | None = None) -> dict[str, ValueType]:
        return dict(self._function(function).inputs)

    def outputs(self, function: str | None = None) -> dict[str, ValueType]:
        return dict(self._function(function).outputs)

    def run(self, inputs: dict[str, np.ndarray], function: str | None = None) -> dict[str, np.ndarray]:
        """Outputs by name, for inputs of exactly the declared names, shapes and dtypes.

        Raises EdgeVitError for other inputs, and when an op's result is not what the program declares.
        """
        return self._function(function).run(inputs)

    def _function(self, name: str | None) -> _Function:
        try:
            return self._functions[name or self.default_function]
        except KeyError:
            raise EdgeVitError(f"{self.path}: no function {name!r}; it has {', '.join(self.functions)}") from None


@dataclass(frozen=True)
class _Output:
    """A result of a step. fp16 is held in fp32; `rounds` says that the step's result must be rounded to fp16 first."""

    name: str
    type: ValueType
    held_as: torch.dtype
    rounds: bool


@dataclass(frozen=True)
class _Step:
    """One op, ready to run: `arguments` are names of values in the order of the call (None: left out)."""

    label: str
    call: Callable[..., Any]
    arguments: tuple[str | list[str] | None, ...]
    outputs: tuple[_Output, ...]

    def names(self) -> list[str]:
        return [name for item in self.arguments if item for name in (item if isinstance(item, list) else [item])]

    def run(self, values: dict[str, Tensor]) -> None:
        arguments = [
            None if item is None else values[item] if isinstance(item, str) else [values[name] for name in item]
            for item in self.arguments
        ]
        try:
            results = self.call(*arguments)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise EdgeVitError(f"{self.label}: {str(error).splitlines()[0]}") from error
        if isinstance(results, Tensor):
            results = (results,)
        if len(results) != len(self.outputs):
            raise EdgeVitError(f"{self.label}: gives {len(results)} values, the program declares {len(self.outputs)}")
        for output, tensor in zip(self.outputs, results, strict=True):
            if output.rounds:
                tensor = tensor.half().float()
            if tensor.dtype != output.held_as or not _fits(tensor.shape, output.type.shape):
                found = ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                raise EdgeVitError(f"{self.label}: {output.name!r} is {found}, the program declares {output.type}")
            values[output.name] = tensor


class _Function:
    """One function of a program: its constants as tensors, and its steps in order."""

    def __init__(self, where: str, inputs: Sequence[Any], block: Any, weights: _Weights) -> None:
        self.where = where
        self.inputs = {item.name: _value_type(item, where) for item in inputs}
        self._constants: dict[str, Constant] = {}
        self._tensors: dict[str, Tensor] = {}  # the constants that steps take as tensors
        self._steps: list[_Step] = []
        types = dict(self.inputs)
        for operation in block.operations:
            types |= {item.name: _value_type(item, where) for item in operation.outputs}
            if operation.type == "const":
                name = operation.outputs[0].name
                self._constants[name] = weights.value(operation.attributes["val"], f"{where}: {name!r}")
            else:
                self._add(operation, types, weights)
        self.outputs = {name: types[name] for name in block.outputs}
        for name in self.outputs:
            if name in self._constants:
                self._tensors[name] = self._tensor(name)
        self._dead_after = self._last_uses()

    def _add(self, operation: Any, types: dict[str, ValueType], weights: _Weights) -> None:
        """Prepares one op; one that depends on constants alone is computed now and becomes a constant."""
        label = f"{self.where}: op {operation.type} ({operation.outputs[0].name!r})"
        bound = {
            name: [self._bind(item, f"{operation.outputs[0].name}.{name}.{i}", weights, label) for i, item in arguments]
            for name, arguments in ((key, enumerate(value.arguments)) for key, value in operation.inputs.items())
        }
        op = OPS[operation.type]
        tensors: list[str | list[str] | None] = []
        for spelled in op.inputs:
            names = bound.pop(spelled.strip("*?"), None)
            if names is None and not spelled.endswith("?"):
                raise EdgeVitError(f"{label}: input {spelled.strip('*')!r} is missing")
            tensors.append(names if names is None or spelled.startswith("*") else names[0])
        attributes = {name: self._attribute(names[0], f"{label}: argument {name!r}") for name, names in bound.items()}
        outputs = tuple(
            _Output(item.name, type_, _held_as(type_.dtype), type_.dtype == "float16" and not op.selects)
            for item, type_ in ((item, types[item.name]) for item in operation.outputs)
        )
        step = _Step(label, _made(operation.type, attributes, label), tuple(tensors), outputs)
        constant = [name for name in step.names() if name in self._constants]
        self._tensors |= {name: self._tensor(name) for name in constant}
        if len(constant) < len(step.names()):
            self._steps.append(step)
        else:
            with torch.inference_mode():
                step.run(self._tensors)
            self._constants |= {item.name: self._tensors[item.name].numpy() for item in outputs}

    def _bind(self, binding: Any, name: str, weights: _Weights, label: str) -> str:
        """The name of an argument's value; a value that stands in the op itself becomes a constant called `name`."""
        if binding.WhichOneof("binding") == "name":
            return str(binding.name)
        self._constants[name] = weights.value(binding.value, label)
        return name

    def _attribute(self, name: str, label: str) -> Any:
        if name not in self._constants:
            raise EdgeVitError(f"{label} is computed at run time; the evaluator takes constants only there")
        value = self._constants[name]
        return value.tolist() if isinstance(value, np.ndarray) else value

    def _tensor(self, name: str) -> Tensor:
        value = self._constants[name]
        if not isinstance(value, np.ndarray):
            raise EdgeVitError(f"{self.where}: {name!r} is text where a tensor is expected")
        return self._tensors[name] if name in self._tensors else torch.from_numpy(value)

    def _last_uses(self) -> list[list[str]]:
        """By step, the values that no later step and no output needs."""
        seen = set(self.outputs) | set(self._tensors)
        dead: list[list[str]] = []
        for step in reversed(self._steps):
            names = {*step.names(), *(output.name for output in step.outputs)} - seen
            seen |= names
            dead.append(sorted(names))
        return dead[::-1]

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = self._tensors | self._checked(inputs)
        with torch.inference_mode():
            for step, dead in zip(self._steps, self._dead_after, strict=True):
                step.run(values)
                for name in dead:
                    del values[name]
        return {name: values[name].numpy().astype(type_.dtype) for name, type_ in self.outputs.items()}

    def _checked(self, inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
        if inputs.keys() != self.inputs.keys():
            raise EdgeVitError(f"{self.where}: takes {', '.join(self.inputs)}; got {', '.join(inputs) or 'nothing'}")
        tensors = {}
        for name, declared in self.inputs.items():
            found = ValueType(inputs[name].shape, inputs[name].dtype.name)
            if found.dtype != declared.dtype or not _fits(found.shape, declared.shape):
                raise EdgeVitError(f"{self.where}: input {name!r} is {found}, the program declares {declared}")
            tensors[name] = torch.from_numpy(np.array(inputs[name])).to(_held_as(declared.dtype))
        return tensors


class _Weights:
    """Constants of a package: values in the protobuf itself, or in a blob file; each blob is read once."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "Data" / "com.apple.CoreML" / "weights"
        self._readers: dict[str, Any] = {}
        self._blobs: dict[tuple[str, int, str], np.ndarray] = {}

    def value(self, value: Any, label: str) -> Constant:
        type_ = _tensor_type(value.type, label)
        if value.WhichOneof("value") == "blobFileValue":
            array = self._blob(value.blobFileValue, type_, label)
        elif value.immediateValue.WhichOneof("value") == "tensor":
            tensor = value.immediateValue.tensor
            values = getattr(tensor, tensor.WhichOneof("value")).values
            if type_.dtype == "str":
                return list(values) if type_.shape else values[0]
            array = np.frombuffer(values, type_.dtype) if isinstance(values, bytes) else np.array(values, type_.dtype)
            array = array.astype("float32") if type_.dtype == "float16" else array.copy()
        else:
            raise EdgeVitError(f"{label}: a constant that is not a tensor is not supported")
        try:
            return array.reshape(type_.shape)
        except (ValueError, TypeError) as error:
            raise EdgeVitError(f"{label}: {array.size} elements, the program declares {type_}") from error

    def _blob(self, blob: Any, type_: ValueType, label: str) -> np.ndarray:
        file = Path(blob.fileName).name
        key = (file, blob.offset, type_.dtype)
        if key not in self._blobs:
            try:
                reader = self._readers.get(file) or self._readers.setdefault(file, BlobReader(str(self.folder / file)))
                array = getattr(reader, f"read_{BLOB_NAMES.get(type_.dtype, type_.dtype)}_data")(blob.offset)
            except (RuntimeError, AttributeError) as error:
                raise EdgeVitError(f"{label}: cannot read weights/{file} ({error}); export it again") from error
            half = type_.dtype == "float16"  # the reader gives fp16 as its bits
            self._blobs[key] = array.view("float16").astype("float32") if half else np.array(array)
        return self._blobs[key]


def _read_spec(path: Path) -> Any:
    if not path.exists():
        raise EdgeVitError(f"{path}: no such file")
    try:
        spec = coremltools.utils.load_spec(str(path))
    except Exception as error:  # the loaders raise bare Exception, RuntimeError, OSError and protobuf's own
        raise EdgeVitError(f"{path}: not a readable .mlpackage ({str(error).splitlines()[0]})") from error
    if spec.WhichOneof("Type") != "mlProgram" or not spec.mlProgram.functions:
        raise EdgeVitError(f"{path}: holds a {spec.WhichOneof('Type') or 'foreign file'}, not an ML Program")
    return spec


def _check_ops(path: Path, blocks: Any) -> None:
    kinds = collections.Counter(operation.type for block in blocks for operation in block.operations)
    missing = [f"{kind} (×{count})" for kind, count in sorted(kinds.items()) if kind not in OPS and kind != "const"]
    if missing:
        raise EdgeVitError(f"{path}: the evaluator (converters/mil_ops.py) lacks the ops {', '.join(missing)}")


def _made(kind: str, attributes: dict[str, Any], label: str) -> Callable[..., Any]:
    make = OPS[kind].make
    try:
        inspect.signature(make).bind(**attributes)
        return make(**attributes)
    except (TypeError, NotImplementedError) as error:
        raise EdgeVitError(f"{label}: not supported: {error}") from error


def _value_type(item: Any, where: str) -> ValueType:
    return _tensor_type(item.type, f"{where}: {item.name!r}")


def _tensor_type(type_: Any, label: str) -> ValueType:
    tensor = type_.tensorType
    if type_.WhichOneof("type") != "tensorType" or tensor.dataType not in DTYPES:
        kind = type_.WhichOneof("type")
        kind = MIL_pb2.DataType.Name(tensor.dataType) if kind == "tensorType" else kind
        raise EdgeVitError(f"{label}: values of type {kind} are not supported")
    sizes = (item.constant.size if item.WhichOneof("dimension") == "constant" else None for item in tensor.dimensions)
    return ValueType(tuple(sizes), DTYPES[tensor.dataType])


def _held_as(dtype: str) -> torch.dtype:
    if dtype == "str":
        return torch.uint8  # never reached by a tensor: no op of the table gives text
    return torch.float32 if dtype == "float16" else getattr(torch, dtype)


def _fits(shape: Sequence[int], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        size in (None, found) for found, size in zip(shape, declared, strict=True)
    )
