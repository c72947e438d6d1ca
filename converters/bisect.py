"""Where a file first computes something else than its module: intermediate values of both, side by side.

The module's torch.export graph is run node by node, and so is the file. Converters rename, reorder, transpose and
fuse, so a node's output is looked for among all of the file's values: in every order of the axes that gives its
shape, else by its sorted numbers, which are the same in every layout. A node that was fused away has no counterpart,
which is no fault as long as something computed from it has one. The culprit is the first node without a counterpart
from which nothing with a counterpart follows.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from converters.intermediates import Intermediate, intermediates
from converters.quiet import quiet
from converters.signature import Signature
from converters.unsupported import untraceable
from converters.wrap import Named

# A counterpart's numbers differ by at most this share of the tensor's std, plus this share of each number (fp16 rounds
# large numbers in proportion to themselves).
TOLERANCES = {"fp32": (1e-4, 1e-6), "fp16": (2e-2, 4e-3)}
SMALLEST = 4  # with fewer elements a tensor is matched by chance
SAMPLES = 1 << 16  # of a larger tensor, so many numbers are kept
MAX_RANK = 5  # a tensor of higher rank is compared by its sorted numbers only
TAKES_PART = {"chunk", "getitem", "index", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"}
TORCH_FOLDER = Path(torch.__file__).parent
SAME, FUSED, DIFFERS, FOLLOWS, SKIPPED = "same", "fused", "differs", "follows from it", "not compared"


@dataclass(frozen=True)
class Step:
    """One node of the module's graph. `error` is that of the closest value in the file, in shares of the std."""

    module: str  # the PyTorch module's path; "" for the outermost
    op: str
    shape: tuple[int, ...]
    source: str  # file and line of the call
    verdict: str
    error: float | None = None
    counterpart: str = ""  # the closest value's name in the file


@dataclass(frozen=True)
class Bisection:
    """Every node in order; `culprit` is None where every floating-point output has its counterpart."""

    steps: tuple[Step, ...]
    culprit: Step | None

    @property
    def sentence(self) -> str:
        if self.culprit is None:
            return "every floating-point output agrees on this example; no module differs"
        step = self.culprit
        where = f"module '{step.module}'" if step.module else "the outermost module"
        source = f", called at {step.source}" if step.source else ""
        return f"the first output that differs is {step.op} {_written(step.shape)} in {where}{source}"


def bisect(
    path: Path,
    module: nn.Module,
    signature: Signature,
    inputs: Mapping[str, np.ndarray],
    *,
    precision: str = "fp32",
    entry_point: str | None = None,
    file_inputs: Mapping[str, np.ndarray] | None = None,
) -> Bisection:
    """Compares `module` with the file at `path` on one example: arrays (1, …) by the signature's input names.

    `entry_point` is the file's signature or function; `file_inputs` are the same arrays by the file's own names, where
    these differ. Raises EdgeVitError when torch.export cannot trace the module or the file cannot be run node by node.
    """
    nodes = _torch_values(module, signature, inputs)
    values = intermediates(path, file_inputs or inputs, entry_point)
    _find_counterparts(nodes, values, TOLERANCES.get(precision, TOLERANCES["fp16"]))
    return _judge(nodes)


@dataclass
class _TorchNode:
    """A node of the exported graph: what is kept of its output, who reads it, and the closest value in the file."""

    module: str
    op: str
    shape: tuple[int, ...]
    source: str
    readers: list[str]
    is_output: bool
    numbers: _Numbers | None  # None where the output is no floating-point tensor
    error: float | None = None
    counterpart: str = ""
    same: bool = False

    @property
    def comparable(self) -> bool:
        """Not a constant, nor so small that it would be matched by chance; an output always."""
        if self.numbers is None or not self.numbers.count:
            return False
        return self.is_output or (self.numbers.count >= SMALLEST and self.numbers.std > 0)


@dataclass(frozen=True)
class _Numbers:
    """An even sample of a tensor's numbers: sorted, and by their places."""

    shape: tuple[int, ...]
    sorted: np.ndarray
    placed: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> _Numbers:
        values = array.astype(np.float32)
        return cls(
            array.shape, np.sort(values, axis=None)[_places(array.size)], values.reshape(-1)[_places(array.size)]
        )

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))

    @functools.cached_property
    def std(self) -> float:
        """Of the finite numbers; of a single one, its size."""
        finite = self.sorted[np.isfinite(self.sorted)]
        return float(finite.std()) if finite.size > 1 else float(np.abs(finite).sum())

    def compare(self, other: _Numbers, array: np.ndarray, tolerance: tuple[float, float]) -> tuple[float, bool]:
        """Error in shares of the std, and whether `array`, of which `other` was taken, holds the same numbers."""
        error, same = self._compared(self.sorted, other.sorted, tolerance)
        if not same:
            return error, False
        arrangements = list(_arrangements(array, self.shape))
        for arranged in arrangements:
            placed_error, placed_same = self._compared(self.placed, arranged, tolerance)
            if placed_same:
                return placed_error, True
        return error, not arrangements  # of the right shape, and with other numbers at its places

    def _compared(self, mine: np.ndarray, other: np.ndarray, tolerance: tuple[float, float]) -> tuple[float, bool]:
        with np.errstate(invalid="ignore"):
            difference = np.where(mine == other, 0.0, np.abs(mine - other))  # equal infinities are no difference
            allowed = tolerance[0] * self.std + tolerance[1] * np.abs(mine)
            # Never the same where one of them is not a number.
            return float(difference.max()) / max(self.std, 1e-30), bool((difference <= allowed).all())


def _places(count: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, SAMPLES)).astype(np.int64)


def _arrangements(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The sampled numbers of `array` in each order of its axes that gives `shape`; axes of length 1 do not matter."""
    wanted = tuple(length for length in shape if length > 1)
    squeezed = array.squeeze()
    if sorted(wanted) != sorted(squeezed.shape) or len(wanted) > MAX_RANK:
        return
    places = np.unravel_index(_places(array.size), wanted) if wanted else ()
    for order in itertools.permutations(range(len(wanted))):
        if tuple(squeezed.shape[axis] for axis in order) == wanted:
            yield np.atleast_1d(squeezed.transpose(order)[places]).astype(np.float32)


def _torch_values(module: nn.Module, signature: Signature, inputs: Mapping[str, np.ndarray]) -> dict[str, _TorchNode]:
    arguments = {spec.name: torch.from_numpy(np.array(inputs[spec.name])) for spec in signature.inputs}
    try:
        with quiet():
            program = torch.export.export(Named(module, signature).eval(), (), kwargs=arguments, strict=False)
    except Exception as error:  # whatever a stranger's module makes torch.export say
        raise untraceable(error) from error
    graph_module: Any = program.module()
    recorder = _Recorder(graph_module)
    with torch.inference_mode():
        recorder.run(*arguments.values())
    return recorder.recorded


class _Recorder(torch.fx.Interpreter):
    """Keeps every call's numbers at the time of the call: a later one may write into them."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.recorded: dict[str, _TorchNode] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not n.name.startswith("_guards"):
            is_tensor = isinstance(result, torch.Tensor)
            self.recorded[n.name] = _TorchNode(
                module=_module_path(n),
                op=_op_name(n),
                shape=tuple(result.shape) if is_tensor else (),
                source=_source_line(n.meta.get("stack_trace") or ""),
                readers=[user.name for user in n.users],
                is_output=any(user.op == "output" for user in n.users),
                numbers=_Numbers.of(result.numpy()) if is_tensor and result.is_floating_point() else None,
            )
        return result


def _find_counterparts(
    nodes: dict[str, _TorchNode], values: Iterable[Intermediate], tolerance: tuple[float, float]
) -> None:
    """Gives each node the first of the file's values that holds its numbers, else the closest one's error."""
    by_count: dict[int, list[_TorchNode]] = defaultdict(list)
    for node in nodes.values():
        if node.comparable and node.numbers:
            by_count[node.numbers.count].append(node)
    for name, _, array in values:
        waiting = [node for node in by_count.get(array.size, []) if not node.same] if array.dtype.kind == "f" else []
        if not waiting:
            continue
        numbers = _Numbers.of(array)
        for node in waiting:
            assert node.numbers is not None
            error, same = node.numbers.compare(numbers, array, tolerance)
            if same or node.error is None or error < node.error:
                node.error, node.counterpart, node.same = error, name, same


def _judge(nodes: dict[str, _TorchNode]) -> Bisection:
    # From the last node to the first: does a counterpart follow from it, and does it lead to a wrong output?
    good: dict[str, bool] = {}
    leads: dict[str, bool] = {}
    for name, node in reversed(nodes.items()):
        readers = [reader for reader in node.readers if reader in nodes]
        # A part that is right does not make the whole right: all parts that are read must be.
        parts = [reader for reader in readers if nodes[reader].op in TAKES_PART]
        whole = [reader for reader in readers if nodes[reader].op not in TAKES_PART]
        good[name] = (
            node.same
            or any(good[reader] for reader in whole)
            or (bool(parts) and all(good[reader] for reader in parts))
        )
        wrong_output = node.is_output and node.comparable and not node.same
        leads[name] = wrong_output or any(leads[reader] for reader in readers)
    culprit = next((name for name in nodes if leads[name] and not good[name] and nodes[name].comparable), None)
    steps = {}
    for name, node in nodes.items():
        if not node.comparable:
            verdict = SKIPPED
        elif node.same:
            verdict = SAME
        elif name == culprit:
            verdict = DIFFERS
        else:
            verdict = FOLLOWS if leads[name] and not good[name] else FUSED
        counterpart = node.counterpart if node.same else ""
        steps[name] = Step(node.module, node.op, node.shape, node.source, verdict, node.error, counterpart)
    return Bisection(tuple(steps.values()), steps[culprit] if culprit else None)


def _module_path(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path == "module" else path.removeprefix("module.")


def _op_name(node: torch.fx.Node) -> str:
    target = node.target
    name = getattr(target, "__name__", None) or str(target)
    return name.split(".")[0]


def _source_line(trace: str) -> str:
    """`model.py:31` of the innermost frame that is not torch's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [frame for frame in frames if not Path(frame[0]).is_relative_to(TORCH_FOLDER)] or frames
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _written(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
