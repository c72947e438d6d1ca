"""A saved Core ML program, executed with torch: coremltools converts and saves on Linux but cannot predict there.

`Program(path)` reads the .mlpackage's protobuf and weights and prepares each function as a list of torch calls. It
checks the program and its weights, not Apple's hardware. fp16 values are computed in fp32 and each op's result is
rounded to fp16; hardware may keep more or fewer bits inside and between ops. docs/coreml-evaluator.md says more.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converters.errors import EdgeVitError
from converters.mil_ops import OPS
from converters.mil_package import Constant, ValueType, Weights, read_spec, value_type


class Program:
    """An ML Program on disk (.mlpackage), read once: afterwards the folder may be renamed or removed.

    `metadata` is the user-defined metadata. Raises EdgeVitError when `path` is missing, foreign or truncated, or uses
    ops or arguments that the evaluator lacks; all missing ops are named at once.
    """

    def __init__(self, path: Path) -> None:
        spec = read_spec(path)
        functions = spec.mlProgram.functions
        blocks = {name: item.block_specializations[item.opset] for name, item in functions.items()}
        _check_ops(path, blocks.values())
        self.path = path
        self.metadata: dict[str, str] = dict(spec.description.metadata.userDefined)
        self.functions: list[str] = list(functions)
        named = spec.description.defaultFunctionName or "main"
        self.default_function: str = named if named in self.functions else self.functions[0]
        weights = Weights(path)
        self._functions = {
            name: _Function(f"{path}: function {name!r}", item.inputs, blocks[name], weights)
            for name, item in functions.items()
        }

    def inputs(self, function: str | None = None) -> dict[str, ValueType]:
        """Names, shapes and dtypes that `run` takes."""
        return dict(self._function(function).inputs)

    def outputs(self, function: str | None = None) -> dict[str, ValueType]:
        """Names, shapes and dtypes that `run` gives."""
        return dict(self._function(function).outputs)

    def run(self, inputs: dict[str, np.ndarray], function: str | None = None) -> dict[str, np.ndarray]:
        """Outputs by name, for inputs of exactly the declared names, shapes and dtypes.

        Raises EdgeVitError for other inputs, and when an op's result is not what the program declares.
        """
        return self._function(function).run(inputs)

    def values(
        self, inputs: dict[str, np.ndarray], function: str | None = None
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """What each op computes for `inputs`, in the program's order: name, op type, array."""
        return self._function(function).values(inputs)

    def _function(self, name: str | None) -> _Function:
        try:
            return self._functions[name or self.default_function]
        except KeyError:
            raise EdgeVitError(f"{self.path}: no function {name!r}; it has {', '.join(self.functions)}") from None


@dataclass(frozen=True)
class _Output:
    """A result of a step. fp16 is held in fp32; `rounds` says that the result must be rounded to fp16 first."""

    name: str
    type: ValueType
    rounds: bool

    def store(self, tensor: Tensor, values: dict[str, Tensor], label: str) -> None:
        if self.rounds:
            tensor = tensor.half().float()
        found = _type_of(tensor)
        if not _held(self.type).matches(found):
            raise EdgeVitError(f"{label}: {self.name!r} is {found}, the program declares {self.type}")
        values[self.name] = tensor


@dataclass(frozen=True)
class _Step:
    """One op, ready to run: `arguments` are names of values in the order of the call (None: left out)."""

    label: str
    call: Callable[..., Any]
    arguments: tuple[str | list[str] | None, ...]
    outputs: tuple[_Output, ...]
    kind: str

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
            output.store(tensor, values, self.label)


class _Function:
    """One function of a program: its constants as tensors, and its steps in order."""

    def __init__(self, where: str, inputs: Sequence[Any], block: Any, weights: Weights) -> None:
        self.where = where
        self.inputs = {item.name: value_type(item, where) for item in inputs}
        self._types = dict(self.inputs)
        self._constants: dict[str, Constant] = {}
        self._tensors: dict[str, Tensor] = {}  # the constants that steps take as tensors
        self._steps: list[_Step] = []
        for operation in block.operations:
            self._types |= {item.name: value_type(item, where) for item in operation.outputs}
            if operation.type == "const":
                name = operation.outputs[0].name
                self._constants[name] = weights.constant(operation.attributes["val"], f"{where}: {name!r}")
            else:
                self._add(operation, weights)
        self.outputs = {name: self._types[name] for name in block.outputs}
        self._take(self.outputs)
        self._dead_after = self._last_uses()

    def _add(self, operation: Any, weights: Weights) -> None:
        """Prepares one op; one that depends on constants alone is computed now and becomes a constant."""
        label = f"{self.where}: op {operation.type} ({operation.outputs[0].name!r})"
        op, bound = OPS[operation.type], self._bound(operation, weights, label)
        arguments: list[str | list[str] | None] = []
        for spelled in op.inputs:
            names = bound.pop(spelled.strip("*?"), None)
            if names is None and not spelled.endswith("?"):
                raise EdgeVitError(f"{label}: input {spelled.strip('*')!r} is missing")
            arguments.append(names if names is None or spelled.startswith("*") else names[0])
        attributes = {name: self._attribute(names[0], f"{label}: argument {name!r}") for name, names in bound.items()}
        types = {item.name: self._types[item.name] for item in operation.outputs}
        outputs = tuple(
            _Output(name, declared, declared.dtype == "float16" and not op.selects) for name, declared in types.items()
        )
        step = _Step(label, _made(operation.type, attributes, label), tuple(arguments), outputs, operation.type)
        self._check_floats(step, attributes)
        self._take(step.names())
        if all(name in self._constants for name in step.names()):
            with torch.inference_mode():
                step.run(self._tensors)
            self._constants |= {name: self._tensors[name].numpy() for name in types}
        else:
            self._steps.append(step)

    def _bound(self, operation: Any, weights: Weights, label: str) -> dict[str, list[str]]:
        """Argument → names of its values; a value that stands in the op itself becomes a constant with a new name."""
        names: dict[str, list[str]] = {}
        for argument, given in operation.inputs.items():
            names[argument] = []
            for i, binding in enumerate(given.arguments):
                name = binding.name
                if binding.WhichOneof("binding") == "value":
                    name = f"{operation.outputs[0].name}.{argument}.{i}"
                    self._constants[name] = weights.constant(binding.value, f"{label}: argument {argument!r}")
                names[argument].append(name)
        return names

    def _attribute(self, name: str, label: str) -> Any:
        if name not in self._constants:
            raise EdgeVitError(f"{label} is computed at run time; the evaluator takes only a constant there")
        value = self._constants[name]
        return value.tolist() if isinstance(value, np.ndarray) else value

    def _check_floats(self, step: _Step, attributes: dict[str, Any]) -> None:
        """fp16 and fp32 look alike once they are held in fp32, so their declarations are compared here."""
        given = {self._types[name].dtype for name in step.names() if name in self._types}
        if "dtype" in attributes:  # cast
            given = {{"fp16": "float16", "fp32": "float32"}.get(attributes["dtype"], "")}
        given &= {"float16", "float32"}
        for output in step.outputs:
            if given and output.type.dtype.startswith("float") and given != {output.type.dtype}:
                raise EdgeVitError(
                    f"{step.label}: {output.name!r} is declared {output.type}, its inputs {', '.join(sorted(given))}"
                )

    def _take(self, names: Iterable[str]) -> None:
        """Makes tensors of those of the named values that are constants."""
        for name in names:
            constant = self._constants.get(name)
            if isinstance(constant, np.ndarray):
                self._tensors[name] = torch.from_numpy(constant)
            elif constant is not None or name not in self._types:
                raise EdgeVitError(f"{self.where}: {name!r} is not a tensor")

    def _last_uses(self) -> list[list[str]]:
        """By step, the values that no later step and no output needs."""
        needed = set(self.outputs)
        dead: list[list[str]] = []
        for step in reversed(self._steps):
            names = {*step.names(), *(output.name for output in step.outputs)} - needed
            needed |= names
            dead.append(sorted(names))
        return dead[::-1]

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = self._tensors | self._checked(inputs)
        with torch.inference_mode():
            for step, dead in zip(self._steps, self._dead_after, strict=True):
                step.run(values)
                for name in dead:
                    del values[name]
        return {name: values[name].numpy().astype(declared.dtype) for name, declared in self.outputs.items()}

    def values(self, inputs: dict[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
        values = self._tensors | self._checked(inputs)
        for step, dead in zip(self._steps, self._dead_after, strict=True):
            with torch.inference_mode():
                step.run(values)
            for output in step.outputs:
                yield output.name, step.kind, values[output.name].numpy().copy()
            for name in dead:
                del values[name]

    def _checked(self, inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
        if inputs.keys() != self.inputs.keys():
            raise EdgeVitError(f"{self.where}: takes {', '.join(self.inputs)}; got {', '.join(inputs) or 'nothing'}")
        tensors = {}
        for name, declared in self.inputs.items():
            found = ValueType(inputs[name].shape, inputs[name].dtype.name)
            if not declared.matches(found):
                raise EdgeVitError(f"{self.where}: input {name!r} is {found}, the program declares {declared}")
            tensors[name] = torch.from_numpy(inputs[name].astype(_held(declared).dtype))
        return tensors


def _check_ops(path: Path, blocks: Iterable[Any]) -> None:
    kinds = collections.Counter(operation.type for block in blocks for operation in block.operations)
    missing = [f"{kind} (×{count})" for kind, count in sorted(kinds.items()) if kind not in OPS and kind != "const"]
    if missing:
        raise EdgeVitError(f"{path}: the evaluator (converters/mil_ops.py) lacks the ops {', '.join(missing)}")


def _made(kind: str, attributes: dict[str, Any], label: str) -> Callable[..., Any]:
    make = OPS[kind].make
    try:
        inspect.signature(make).bind(**attributes)
        return make(**attributes)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise EdgeVitError(f"{label}: not supported: {error}") from error


def _held(declared: ValueType) -> ValueType:
    return ValueType(declared.shape, "float32") if declared.dtype == "float16" else declared


def _type_of(tensor: Tensor) -> ValueType:
    return ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
