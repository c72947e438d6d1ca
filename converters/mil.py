"""A saved Core ML program, executed with torch: coremltools converts and saves on Linux but cannot predict there.

`Program(path)` reads the .mlpackage's protobuf and weights and prepares each function as a list of torch calls. It
checks the program and its weights, not Apple's hardware. fp16 values are computed in fp32 and each op's result is
rounded to fp16; hardware may keep more or fewer bits inside and between ops. docs/coreml-evaluator.md says more.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converters.errors import EdgeVitError
from converters.mil_block import CONTROL, Block, Classify, Output, Run, Scope
from converters.mil_ops import OPS
from converters.mil_package import ValueType, Weights, read_spec, value_type
from converters.mil_ports import described, input_port, output_port

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class OpInfo:
    """An op of a program: its type, the values that it reads, and those that it makes. Constants are not among them."""

    kind: str
    inputs: tuple[str, ...]
    outputs: dict[str, ValueType]


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
            name: _Function(f"{path}: function {name!r}", item.inputs, blocks[name], weights, described(spec, name))
            for name, item in functions.items()
        }

    def inputs(self, function: str | None = None) -> dict[str, ValueType]:
        """Names, shapes and dtypes that `run` takes. A picture is uint8 (N, H, W, 3), RGB, or (N, H, W, 1)."""
        return {name: port.type for name, port in self._function(function).ports.items()}

    def outputs(self, function: str | None = None) -> dict[str, ValueType]:
        """Names, shapes and dtypes that `run` gives; of a classifier the label (1,) and the probabilities (1, K).

        A picture is uint8 (N, H, W, 3), RGB, or (N, H, W, 1): rounded, and cut off at 0 and 255.
        """
        return {name: port.type for name, port in self._function(function).given.items()}

    def states(self, function: str | None = None) -> dict[str, ValueType]:
        """Names, shapes and dtypes of what is kept from one run to the next, such as a KV cache."""
        return dict(self._function(function).states)

    def labels(self, function: str | None = None) -> tuple[str, ...]:
        """A classifier's labels, in the order of its probabilities; empty for other programs."""
        return self._function(function).labels

    def ops(self, function: str | None = None) -> list[OpInfo]:
        """A function's ops in the order of the run. What depends on constants alone is not among them."""
        chosen = self._function(function)
        return [
            OpInfo(
                step.kind,
                tuple(name for name in step.names() if name not in chosen.scope.constants),
                {output.name: output.type for output in step.outputs},
            )
            for step in chosen.block.steps
        ]

    def run(
        self,
        inputs: Arrays,
        function: str | None = None,
        *,
        states: Arrays | None = None,
        half: Collection[str] = (),
    ) -> Arrays:
        """Outputs by name, for inputs of exactly the declared names, shapes and dtypes.

        `states` holds the states by name and is brought up to date: give the same dict to the next run. A state that
        it lacks begins as zeros, as do all where it is left out. The ops that make the values named in `half` are
        computed as fp16 ops would be, to foresee what an fp32 program would lose. Raises EdgeVitError for other
        inputs, and when an op's result is not what the program declares.
        """
        chosen = self._function(function)
        with torch.inference_mode():
            run = chosen.start(inputs, states)
            run.half = half
            for _ in chosen.block.execute(run):
                pass
        if states is not None:
            states |= {name: run.values[name].numpy().astype(kind.dtype) for name, kind in chosen.states.items()}
        return chosen.results(run)

    def values(self, inputs: Arrays, function: str | None = None) -> Iterator[tuple[str, str, np.ndarray]]:
        """Every op's outputs in the order of the run: name, type of the op, array as the program declares it.

        What depends on constants alone is not among them. An op inside a loop comes once a turn.
        """
        for output, kind, tensor in self._watched(inputs, function, rounds=True):
            yield output.name, kind, tensor.numpy().astype(output.type.dtype)

    def ranges(self, inputs: Arrays, function: str | None = None) -> dict[str, float]:
        """Largest magnitude of each op's floating-point outputs by name, computed in fp32 whatever the program says.

        Infinities are left out, since masks hold them on purpose; a value with a NaN in it has the range NaN.
        """
        found: dict[str, float] = {}
        for output, _, tensor in self._watched(inputs, function, rounds=False):
            if tensor.dtype.is_floating_point and tensor.numel():
                largest = tensor.abs().max().item()
                if math.isinf(largest):
                    largest = tensor.abs().masked_fill(tensor.isinf(), 0.0).max().item()
                found[output.name] = largest if largest != largest else max(largest, found.get(output.name, 0.0))
        return found

    def _watched(self, inputs: Arrays, function: str | None, *, rounds: bool) -> Iterator[tuple[Output, str, Tensor]]:
        chosen = self._function(function)
        with torch.inference_mode():
            run = chosen.start(inputs, None)
        run.rounds = rounds
        steps = chosen.block.execute(run)
        while True:
            with torch.inference_mode():  # not held while the caller works
                step = next(steps, None)
            if step is None:
                return
            for output in step.outputs:
                if output.type.dtype != "str":
                    yield output, step.kind, run.values[output.name]

    def _function(self, name: str | None) -> _Function:
        try:
            return self._functions[name or self.default_function]
        except KeyError:
            raise EdgeVitError(f"{self.path}: no function {name!r}; it has {', '.join(self.functions)}") from None


class _Function:
    """One function of a program, ready to run."""

    def __init__(self, where: str, inputs: Iterable[Any], block: Any, weights: Weights, description: Any) -> None:
        self.where = where
        declared = {item.name: item for item in inputs}
        features = {item.name: item for item in description.input}
        types = {name: value_type(item, where) for name, item in declared.items()}
        self.states = {
            name: types[name] for name, item in declared.items() if item.type.WhichOneof("type") == "stateType"
        }
        self.ports = {
            name: input_port(kind, features.get(name)) for name, kind in types.items() if name not in self.states
        }
        self.scope = Scope(where, weights, types, {}, {})
        self.block = Block(self.scope, block)
        features = {item.name: item for item in description.output}
        self.given = {name: output_port(self.scope.types[name], features.get(name)) for name in self.block.outputs}
        self.labels: tuple[str, ...] = next(
            (step.labels for step in self.block.steps if isinstance(step, Classify)), ()
        )

    def start(self, inputs: Arrays, states: Arrays | None) -> Run:
        if inputs.keys() != self.ports.keys():
            raise EdgeVitError(f"{self.where}: takes {', '.join(self.ports)}; got {', '.join(inputs) or 'nothing'}")
        tensors = {
            name: port.tensor(inputs[name], f"{self.where}: input {name!r}") for name, port in self.ports.items()
        }
        return Run(self.scope.tensors | tensors | self._state_tensors(states or {}))

    def results(self, run: Run) -> Arrays:
        arrays = {}
        for name, port in self.given.items():
            value = run.values[name]
            arrays[name] = np.array(self.labels)[value.numpy()] if port.type.dtype == "str" else port.array(value)
        return arrays

    def _state_tensors(self, states: Arrays) -> dict[str, Tensor]:
        if unknown := states.keys() - self.states.keys():
            known = ", ".join(self.states) or "none"
            raise EdgeVitError(f"{self.where}: no state {sorted(unknown)[0]!r}; its states: {known}")
        tensors = {}
        for name, declared in self.states.items():
            array = states.get(name)
            if array is None:
                array = np.zeros([size or 0 for size in declared.shape], declared.dtype)
            found = ValueType(array.shape, array.dtype.name)
            if not declared.matches(found):
                raise EdgeVitError(f"{self.where}: state {name!r} is {found}, the program declares {declared}")
            tensors[name] = torch.from_numpy(array.astype(declared.held.dtype))
        return tensors


def _check_ops(path: Path, blocks: Iterable[Any]) -> None:
    kinds = collections.Counter(_kinds(blocks))
    missing = [f"{kind} (×{count})" for kind, count in sorted(kinds.items()) if kind not in OPS and kind not in CONTROL]
    if missing:
        raise EdgeVitError(f"{path}: the evaluator (converters/mil_ops.py) lacks the ops {', '.join(missing)}")


def _kinds(blocks: Iterable[Any]) -> Iterator[str]:
    for block in blocks:
        for operation in block.operations:
            yield operation.type
            yield from _kinds(operation.blocks)
