"""A block of a Core ML program as steps that are ready to run: ops, and what only makes sense inside a program.

Values are torch tensors by name. fp16 ones are held in fp32 and rounded to fp16 after each op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from converters.errors import EdgeVitError, first_line
from converters.mil_ops import OPS
from converters.mil_package import Constant, ValueType, Weights, class_labels, value_type

# What is no op of the table: constants, nested blocks, and what reads or writes something beside values.
CONTROL = ("const", "cond", "while_loop", "write_state", "classify")


@dataclass
class Run:
    """The values of one run. Without `rounds` nothing is rounded to fp16: the program as if it were fp32.

    Ops that make a value named in `half` are computed as if they were fp16: inputs, weights and result are rounded.
    """

    values: dict[str, Tensor]
    rounds: bool = True
    half: Collection[str] = ()


@dataclass(frozen=True)
class Output:
    """A result of a step, as the program declares it. `rounds`: it is fp16 and the op makes new numbers."""

    name: str
    type: ValueType
    rounds: bool = False

    def store(self, tensor: Tensor, run: Run, label: str) -> None:
        if (self.rounds and run.rounds) or self.name in run.half:
            tensor = _rounded(tensor)
        found = ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if not self.type.held.matches(found):
            raise EdgeVitError(f"{label}: {self.name!r} is {found}, the program declares {self.type}")
        run.values[self.name] = tensor


class Step(Protocol):
    """One op of a block. `execute` yields every step that was done, itself last, nested ones before it."""

    @property
    def kind(self) -> str: ...

    @property
    def outputs(self) -> tuple[Output, ...]: ...

    def names(self) -> list[str]:
        """The values that it reads."""
        ...

    def execute(self, run: Run) -> Iterator[Step]: ...


@dataclass(frozen=True)
class Call:
    """An op of the table: `arguments` are names of values in the order of the call (None: left out).

    `late` are the arguments that MIL would also take as constants but that are computed at run time, by name.
    """

    kind: str
    label: str
    make: Callable[..., Any]
    call: Callable[..., Any] | None
    arguments: tuple[str | list[str] | None, ...]
    late: dict[str, str]
    outputs: tuple[Output, ...]

    def names(self) -> list[str]:
        read = [name for item in self.arguments if item for name in (item if isinstance(item, list) else [item])]
        return [*read, *self.late.values()]

    def run(self, run: Run) -> None:
        values = run.values
        if run.half and self.outputs[0].name in run.half:
            values = {name: _rounded(values[name]) for name in self.names()}
        arguments = [
            None if item is None else values[item] if isinstance(item, str) else [values[name] for name in item]
            for item in self.arguments
        ]
        try:
            call = self.call or self.make(**{name: values[value].tolist() for name, value in self.late.items()})
            results = call(*arguments)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise EdgeVitError(f"{self.label}: {first_line(error)}") from error
        if isinstance(results, Tensor):
            results = (results,)
        if len(results) != len(self.outputs):
            raise EdgeVitError(f"{self.label}: gives {len(results)} values, the program declares {len(self.outputs)}")
        for output, tensor in zip(self.outputs, results, strict=True):
            output.store(tensor, run, self.label)

    def execute(self, run: Run) -> Iterator[Step]:
        self.run(run)
        yield self


@dataclass(frozen=True)
class Cond:
    """One of two blocks, by a truth value."""

    label: str
    predicate: str
    branches: tuple[Block, Block]  # taken when true, when false
    outputs: tuple[Output, ...]
    kind: str = "cond"

    def names(self) -> list[str]:
        return [self.predicate, *self.branches[0].names(), *self.branches[1].names()]

    def execute(self, run: Run) -> Iterator[Step]:
        branch = self.branches[0 if bool(run.values[self.predicate]) else 1]
        yield from branch.execute(run)
        for output, name in zip(self.outputs, branch.outputs, strict=True):
            output.store(run.values[name], run, self.label)
        yield self


@dataclass(frozen=True)
class While:
    """A block over and over, as long as another one gives true; both take the loop's variables."""

    label: str
    variables: tuple[str, ...]
    condition: Block
    body: Block
    outputs: tuple[Output, ...]
    kind: str = "while_loop"

    def names(self) -> list[str]:
        return [*self.variables, *self.condition.names(), *self.body.names()]

    def execute(self, run: Run) -> Iterator[Step]:
        current = [run.values[name] for name in self.variables]
        while True:
            run.values.update(zip(self.condition.inputs, current, strict=True))
            yield from self.condition.execute(run)
            if not bool(run.values[self.condition.outputs[0]]):
                break
            run.values.update(zip(self.body.inputs, current, strict=True))
            yield from self.body.execute(run)
            current = [run.values[name] for name in self.body.outputs]
        for output, tensor in zip(self.outputs, current, strict=True):
            output.store(tensor, run, self.label)
        yield self


@dataclass(frozen=True)
class WriteState:
    """Gives a state its new content; the op that follows reads it."""

    state: str
    data: str
    kind: str = "write_state"
    outputs: tuple[Output, ...] = ()

    def names(self) -> list[str]:
        return [self.state, self.data]

    def execute(self, run: Run) -> Iterator[Step]:
        run.values[self.state] = run.values[self.data]
        yield self


@dataclass(frozen=True)
class Classify:
    """Probabilities (…, K) → the index of the likeliest label under `outputs[0]`, and (1, K) under `outputs[1]`."""

    probabilities: str
    labels: tuple[str, ...]
    outputs: tuple[Output, ...]
    kind: str = "classify"

    def names(self) -> list[str]:
        return [self.probabilities]

    def execute(self, run: Run) -> Iterator[Step]:
        scores = run.values[self.probabilities].reshape(1, -1)
        run.values |= {self.outputs[0].name: scores.argmax(-1), self.outputs[1].name: scores}
        yield self


@dataclass
class Scope:
    """What the blocks of one function share: the declared types, the constants, and those needed as tensors."""

    where: str
    weights: Weights
    types: dict[str, ValueType]
    constants: dict[str, Constant]
    tensors: dict[str, Tensor]

    def take(self, names: Iterable[str]) -> None:
        """Makes tensors of those of the named values that are constants."""
        for name in names:
            constant = self.constants.get(name)
            if isinstance(constant, np.ndarray):
                if name not in self.tensors:
                    self.tensors[name] = torch.from_numpy(constant)
            elif constant is not None or name not in self.types:
                raise EdgeVitError(f"{self.where}: {name!r} is not a tensor")


class Block:
    """Steps in order. `inputs` are a loop's variables inside it, `outputs` what it hands out."""

    def __init__(self, scope: Scope, block: Any) -> None:
        self.scope = scope
        self.steps: list[Step] = []
        self.inputs = [item.name for item in block.inputs]
        scope.types |= {item.name: value_type(item, scope.where) for item in block.inputs}
        for operation in block.operations:
            self._add(operation)
        self.outputs: list[str] = list(block.outputs)
        scope.take(name for name in self.outputs if name in scope.constants)
        self._dead = self._last_uses()

    def names(self) -> list[str]:
        """The values that its steps read, and those that it hands out."""
        return [name for step in self.steps for name in step.names()] + self.outputs

    def execute(self, run: Run) -> Iterator[Step]:
        for step, dead in zip(self.steps, self._dead, strict=True):
            yield from step.execute(run)
            for name in dead:
                del run.values[name]

    def _add(self, operation: Any) -> None:
        scope, kind = self.scope, operation.type
        label = f"{scope.where}: op {kind}" + (f" ({operation.outputs[0].name!r})" if operation.outputs else "")
        if kind == "const":
            name = operation.outputs[0].name
            scope.types[name] = value_type(operation.outputs[0], scope.where)
            scope.constants[name] = scope.weights.constant(operation.attributes["val"], f"{scope.where}: {name!r}")
        elif kind == "classify":
            self._add_classify(operation)
        elif kind == "write_state":
            state, data = (_named(operation, argument)[0] for argument in ("input", "data"))
            self._append(WriteState(state, data))
        elif kind in CONTROL:
            self._add_nested(operation, label)
        else:
            self._add_call(operation, label)

    def _append(self, step: Step) -> None:
        self.scope.types |= {output.name: output.type for output in step.outputs}
        self.scope.take(step.names())
        self.steps.append(step)

    def _add_nested(self, operation: Any, label: str) -> None:
        scope = self.scope
        outputs = tuple(Output(item.name, value_type(item, scope.where)) for item in operation.outputs)
        one, two = (Block(scope, block) for block in operation.blocks)
        if operation.type == "cond":
            self._append(Cond(label, _named(operation, "pred")[0], (one, two), outputs))
        else:
            self._append(While(label, tuple(_named(operation, "loop_vars")), one, two, outputs))

    def _add_classify(self, operation: Any) -> None:
        labels = tuple(class_labels(operation.inputs["classes"].arguments[0].value))
        types = ValueType((1,), "str"), ValueType((1, len(labels)), "float32")
        outputs = tuple(Output(item.name, kind) for item, kind in zip(operation.outputs, types, strict=True))
        self._append(Classify(_named(operation, "probabilities")[0], labels, outputs))

    def _add_call(self, operation: Any, label: str) -> None:
        """Prepares one op; one that depends on constants alone is computed now and becomes a constant."""
        scope, op, bound = self.scope, OPS[operation.type], self._bound(operation, label)
        arguments: list[str | list[str] | None] = []
        for spelled in op.inputs:
            names = bound.pop(spelled.strip("*?"), None)
            if names is None and not spelled.endswith("?"):
                raise EdgeVitError(f"{label}: input {spelled.strip('*')!r} is missing")
            arguments.append(names if names is None or spelled.startswith("*") else names[0])
        late = {name: names[0] for name, names in bound.items() if names[0] not in scope.constants}
        attributes = {name: self._attribute(names) for name, names in bound.items() if name not in late}
        types = {item.name: value_type(item, scope.where) for item in operation.outputs}
        outputs = tuple(
            Output(name, declared, declared.dtype == "float16" and not op.selects) for name, declared in types.items()
        )
        make, call = _prepared(operation.type, attributes, late, label)
        step = Call(operation.type, label, make, call, tuple(arguments), late, outputs)
        self._check_floats(step, attributes)
        scope.types |= types
        scope.take(step.names())
        if all(name in scope.constants for name in step.names()):
            with torch.inference_mode():
                step.run(Run(scope.tensors))
            scope.constants |= {name: scope.tensors[name].numpy() for name in types}
        else:
            self.steps.append(step)

    def _bound(self, operation: Any, label: str) -> dict[str, list[str]]:
        """Argument → names of its values; a value that stands in the op itself becomes a constant with a new name."""
        scope, names = self.scope, dict[str, list[str]]()
        for argument, given in operation.inputs.items():
            names[argument] = []
            for i, binding in enumerate(given.arguments):
                name = binding.name
                if binding.WhichOneof("binding") == "value":
                    name = f"{operation.outputs[0].name}.{argument}.{i}"
                    scope.constants[name] = scope.weights.constant(binding.value, f"{label}: argument {argument!r}")
                names[argument].append(name)
        if operation.type.startswith("constexpr_"):  # iOS 16 has their arguments as attributes
            for argument, value in operation.attributes.items():
                if argument != "name":
                    name = f"{operation.outputs[0].name}.{argument}"
                    scope.constants[name] = scope.weights.constant(value, f"{label}: argument {argument!r}")
                    names[argument] = [name]
        return names

    def _attribute(self, names: list[str]) -> Any:
        values = [self.scope.constants[name] for name in names]
        plain = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
        return plain if len(plain) > 1 else plain[0]

    def _check_floats(self, step: Call, attributes: dict[str, Any]) -> None:
        """fp16 and fp32 look alike once they are held in fp32, so their declarations are compared here.

        Since iOS 17 an op's inputs may be of both; its output is of one of them.
        """
        given = {self.scope.types[name].dtype for name in step.names() if name in self.scope.types}
        if "dtype" in attributes:  # cast
            given = {{"fp16": "float16", "fp32": "float32"}.get(attributes["dtype"], "")}
        given &= {"float16", "float32"}
        for output in step.outputs:
            if given and output.type.dtype.startswith("float") and output.type.dtype not in given:
                raise EdgeVitError(
                    f"{step.label}: {output.name!r} is declared {output.type}, its inputs {', '.join(sorted(given))}"
                )

    def _last_uses(self) -> list[list[str]]:
        """By step, the values made in this block that no later step of it and no output needs."""
        made = {output.name for step in self.steps for output in step.outputs}
        needed = set(self.outputs)
        dead: list[list[str]] = []
        for step in reversed(self.steps):
            names = (set(step.names()) & made | {output.name for output in step.outputs}) - needed
            needed |= names
            dead.append(sorted(names))
        return dead[::-1]


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.half().float() if tensor.is_floating_point() else tensor


def _prepared(
    kind: str, attributes: dict[str, Any], late: dict[str, str], label: str
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """What makes the function out of the late arguments, and the function itself where there are none."""
    op = OPS[kind]

    def make(**late_attributes: Any) -> Any:
        try:
            return op.make(**attributes, **late_attributes)
        except NotImplementedError as error:
            raise EdgeVitError(f"{label}: not supported: {error}") from error

    try:
        inspect.signature(op.make).bind(**attributes, **late)
        return make, None if late else make()
    except (TypeError, ValueError) as error:
        raise EdgeVitError(f"{label}: not supported: {error}") from error


def _named(operation: Any, argument: str) -> Sequence[str]:
    return [binding.name for binding in operation.inputs[argument].arguments]
