"""Which ops of a Core ML program stay in fp32 so that its fp16 form neither overflows nor loses too much.

An fp16 program is written first and run; only one that misses is looked into. For that an fp32 twin is run with some of
its ops rounded as fp16 ops would round, which costs a run and no conversion.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from converters import parity
from converters.coreml_program import Traced, write
from converters.errors import ParityError
from converters.mil import Program
from converters.signature import Signature, Size
from converters.wrap import run_module

Arrays = dict[str, np.ndarray]
LARGEST = 32_000.0  # half of fp16's range: other inputs than the samples may reach further
GROUPS = 12  # stretches of the program whose share of the error is measured one by one


@dataclass(frozen=True)
class Reference:
    """Examples at one size, one by one, and the module's outputs for them, stacked."""

    inputs: tuple[Arrays, ...]
    outputs: Arrays
    size: Size
    probabilities: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, signature: Signature, size: Size, samples: Mapping[str, np.ndarray]) -> Reference:
        """`samples` are arrays (N, …) by input name; without a batch dimension each is one example."""
        count = len(next(iter(samples.values())))
        where = [slice(i, i + 1) if signature.batched else i for i in range(count)]
        inputs = tuple({name: np.asarray(array[at]) for name, array in samples.items()} for at in where)
        outputs = _stacked(run_module(module, signature, example) for example in inputs)
        named = tuple(spec.name for spec in signature.outputs if spec.meaning == "probabilities")
        return cls(inputs, outputs, size, named)

    def fed(self, program: Program) -> Iterator[Arrays]:
        """The examples in the program's own types: Core ML has no 64-bit integers."""
        types = program.inputs()
        for example in self.inputs:
            yield {name: array.astype(types[name].dtype) for name, array in example.items()}

    def error(self, program: Program, half: Collection[str] = ()) -> float:
        """The worst output's error as a share of its standard deviation; infinite where one is not finite.

        `half`: as `Program.run` has it.
        """
        try:
            found = _stacked(program.run(inputs, half=half) for inputs in self.fed(program))
            compared = parity.compare(self.outputs, found, self.size, probabilities=self.probabilities)
        except ParityError:
            return math.inf
        return max(item.max_abs_over_std for item in compared)


@dataclass(frozen=True)
class Search:
    """The fp32 twin of an fp16 program, at one size, and what it is held against."""

    twin: Program
    reference: Reference

    @classmethod
    def of(cls, traced: Traced, target: str, reference: Reference, folder: Path) -> Search:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            path = Path(inside) / "fp32.mlpackage"
            write(traced, path, target=target, half=False)
            return cls(Program(path), reference)

    def out_of_range(self) -> dict[str, str]:
        """Ops that make values too large for fp16, and those that read them: name → the reason."""
        large = {name: value for name, value in largest(self.twin, self.reference).items() if value > LARGEST}
        kept = {name: f"{name} reaches {value:,.0f}" for name, value in large.items()}
        for op in self.twin.ops():
            if name := next((name for name in op.inputs if name in large), None):
                kept |= {output: f"it reads {name}" for output in op.outputs if output not in kept}
        return kept

    def sensitive(self, kept: Collection[str], goal: float) -> set[str]:
        """Ops beyond `kept` that must stay in fp32 for an error of at most `goal`, as the twin foresees it.

        The program is cut into stretches. The error of each alone in fp16 is measured, and they are kept in fp32 from
        the worst on until the rest is good enough: few stretches, so that few casts stand between the precisions.
        """
        names = [name for name in self._ops() if name not in kept]
        count = min(GROUPS, len(names))
        stretches = [names[i * len(names) // count : (i + 1) * len(names) // count] for i in range(count)]
        alone = {i: self._error(stretch) for i, stretch in enumerate(stretches)}
        more: set[str] = set()
        for worst in [None, *sorted(alone, key=lambda i: -alone[i])]:
            if worst is not None:
                more.update(stretches[worst])
            if self._error([name for name in names if name not in more]) <= goal:
                break
        return more

    def _ops(self) -> list[str]:
        """Names of the floating-point values that fp16 would round: not a softmax at the end, which stays in fp32."""
        ops, last = self.twin.ops(), set(self.twin.outputs())
        last |= {name for op in ops if op.kind == "classify" for name in op.inputs}
        return [
            name
            for op in ops
            for name, kind in op.outputs.items()
            if kind.dtype == "float32" and op.kind != "classify" and not (op.kind == "softmax" and name in last)
        ]

    def _error(self, half: Collection[str]) -> float:
        return self.reference.error(self.twin, frozenset(half))


def largest(program: Program, reference: Reference) -> dict[str, float]:
    """The largest magnitude of each value over all examples, in fp32."""
    found: dict[str, float] = {}
    for inputs in reference.fed(program):
        for name, value in program.ranges(inputs).items():
            found[name] = max(value, found.get(name, 0.0))
    return found


def _stacked(rows: Iterable[Arrays]) -> Arrays:
    every = list(rows)
    return {name: np.stack([row[name] for row in every]) for name in every[0]}
