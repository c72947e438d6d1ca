"""Where a file first computes something else than its module: intermediate values of both, side by side.

The module's torch.export graph is run node by node, and so is the file. Converters rename, reorder, transpose and
fuse, so a node's output is looked for among all of the file's values by its sorted numbers: those are the same in
every layout. A node that was fused away has no counterpart, which is no fault as long as something computed from it
has one. The culprit is the first node without a counterpart from which nothing with a counterpart follows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from converters.errors import EdgeVitError, first_line
from converters.intermediates import Intermediate, intermediates
from converters.signature import Signature
from converters.wrap import Named

# A counterpart's sorted numbers differ by at most this share of the tensor's std, plus this share of each number
# (fp16 rounds large numbers in proportion to themselves).
TOLERANCES = {"fp32": (1e-4, 1e-6), "fp16": (2e-2, 4e-3)}
SMALLEST = 4  # with fewer elements a tensor is matched by chance
SAMPLES = 1 << 16  # of a larger tensor's sorted numbers, so many are kept
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
    """Every node in order; `culprit` is None where every output has its counterpart."""

    steps: tuple[Step, ...]
    culprit: Step | None

    @property
    def sentence(self) -> str:
        if self.culprit is None:
            return "every output agrees; no module differs"
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
    found = _Values(
        intermediates(path, file_inputs or inputs, entry_point), TOLERANCES.get(precision, TOLERANCES["fp16"])
    )
    return _judge(nodes, found)


@dataclass
class _TorchNode:
    """A node of the exported graph, its sorted output (None where that is no floating-point tensor), its readers."""

    name: str
    module: str
    op: str
    shape: tuple[int, ...]
    source: str
    values: np.ndarray | None
    readers: list[str]
    is_output: bool = False


def _torch_values(module: nn.Module, signature: Signature, inputs: Mapping[str, np.ndarray]) -> dict[str, _TorchNode]:
    arguments = {spec.name: torch.from_numpy(np.array(inputs[spec.name])) for spec in signature.inputs}
    try:
        program = torch.export.export(Named(module, signature).eval(), (), kwargs=arguments, strict=False)
    except Exception as error:  # whatever a stranger's module makes torch.export say
        raise EdgeVitError(f"the module cannot be traced by torch.export: {first_line(error)}") from error
    graph_module: Any = program.module()
    recorder = _Recorder(graph_module)
    with torch.inference_mode():
        recorder.run(*arguments.values())
    return recorder.recorded


class _Recorder(torch.fx.Interpreter):
    """Keeps every call's output as its sorted numbers, at the time of the call: a later one may write into it."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.recorded: dict[str, _TorchNode] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not n.name.startswith("_guards"):
            is_tensor = isinstance(result, torch.Tensor)
            self.recorded[n.name] = _TorchNode(
                name=n.name,
                module=_module_path(n),
                op=_op_name(n),
                shape=tuple(result.shape) if is_tensor else (),
                source=_source_line(n.meta.get("stack_trace") or ""),
                values=_sorted(result.numpy()) if is_tensor and result.is_floating_point() else None,
                readers=[user.name for user in n.users],
                is_output=any(user.op == "output" for user in n.users),
            )
        return result


class _Values:
    """The file's values by number of elements, and the closest of them to a given one."""

    def __init__(self, values: Iterable[Intermediate], tolerance: tuple[float, float]) -> None:
        self.tolerance = tolerance
        self._by_count: dict[int, list[tuple[str, np.ndarray]]] = defaultdict(list)
        for name, _, array in values:
            if array.dtype.kind == "f":
                self._by_count[array.size].append((name, _sorted(array)))

    def closest(self, values: np.ndarray, count: int) -> tuple[float | None, str, bool]:
        """Error in shares of the std, name, and whether that is a counterpart."""
        best: tuple[float | None, str, bool] = (None, "", False)
        share_of_std, share_of_value = self.tolerance
        finite = values[np.isfinite(values)]
        std = float(finite.std()) if finite.size > 1 else float(np.abs(finite).sum())
        for name, candidate in self._by_count.get(count, []):
            with np.errstate(invalid="ignore"):
                difference = np.where(candidate == values, 0.0, np.abs(candidate - values))
            error = float(difference.max()) / max(std, 1e-30)
            allowed = share_of_std * std + share_of_value * np.abs(values)
            same = bool((difference <= allowed).all())  # never, where one of them is not a number
            if same or best[0] is None or (not best[2] and error < best[0]):
                best = (error, name, same)
            if same:
                break
        return best


def _judge(nodes: dict[str, _TorchNode], found: _Values) -> Bisection:
    closest: dict[str, tuple[float | None, str, bool]] = {}
    for node in nodes.values():
        closest[node.name] = (None, "", False)
        if _comparable(node):
            assert node.values is not None
            closest[node.name] = found.closest(node.values, int(np.prod(node.shape)))
    wrong_outputs = [
        node.name for node in nodes.values() if node.is_output and _comparable(node) and not closest[node.name][2]
    ]
    # From the last node to the first: does a counterpart follow from it, and does it lead to a wrong output?
    good: dict[str, bool] = {}
    leads: dict[str, bool] = {}
    for name, node in reversed(nodes.items()):
        readers = [reader for reader in node.readers if reader in nodes]
        good[name] = closest[name][2] or any(good[reader] for reader in readers)
        leads[name] = name in wrong_outputs or any(leads[reader] for reader in readers)
    culprit = next((n for n in nodes if leads[n] and not good[n] and _comparable(nodes[n])), None)
    steps = {name: _step(node, closest[name], good[name], leads[name], name == culprit) for name, node in nodes.items()}
    return Bisection(tuple(steps.values()), steps[culprit] if culprit else None)


def _step(node: _TorchNode, closest: tuple[float | None, str, bool], good: bool, leads: bool, is_culprit: bool) -> Step:
    error, counterpart, same = closest
    if not _comparable(node):
        verdict = SKIPPED
    elif same:
        verdict = SAME
    elif is_culprit:
        verdict = DIFFERS
    else:
        verdict = FUSED if good or not leads else FOLLOWS
    return Step(node.module, node.op, node.shape, node.source, verdict, error, counterpart if same else "")


def _comparable(node: _TorchNode) -> bool:
    """Not a constant one, nor one so small that it would be matched by chance; an output always."""
    values = node.values
    if values is None or values.size == 0:
        return False
    return node.is_output or (values.size >= SMALLEST and bool(values[0] != values[-1]))


def _sorted(array: np.ndarray) -> np.ndarray:
    """The numbers in order as float32; of a large tensor an even sample, with both ends."""
    values = np.sort(array.astype(np.float32), axis=None)
    if values.size <= SAMPLES:
        return values
    return values[np.linspace(0, values.size - 1, SAMPLES).astype(np.int64)]


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
