"""A saved file against its module, at every size that it offers: the promise of an export, kept later and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters import parity
from converters.artifact import Verified
from converters.errors import EdgeVitError, ParityError
from converters.run import Port, Session, load
from converters.signature import Signature, Size, TensorSpec

if TYPE_CHECKING:
    from torch import nn

    from converters.bisect import Bisection

EXAMPLES = 4


@dataclass(frozen=True)
class Verification:
    """`failure` is None where every output at every size keeps the tolerance of `precision`."""

    path: Path
    precision: str
    verified: tuple[Verified, ...]
    mapping: tuple[str, ...]  # how the file's names were taken for the module's, where they differ: one line each
    failure: ParityError | None

    @property
    def worst(self) -> Verified | None:
        return parity.worst(self.verified) if self.verified else None


@dataclass(frozen=True)
class NameMap:
    """The file's names by the module's."""

    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def lines(self) -> tuple[str, ...]:
        pairs = [("input", self.inputs), ("output", self.outputs)]
        return tuple(
            f"{side} '{theirs}' of the file taken for the module's '{ours}', by position"
            for side, names in pairs
            for ours, theirs in names.items()
            if ours != theirs
        )


def verify(
    path: Path | str,
    module: nn.Module,
    signature: Signature,
    sample_inputs: Callable[[Size, int], Mapping[str, np.ndarray]],
    *,
    sizes: Sequence[Size] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Runs the file at `path` at each of `sizes` (by default all that it names) and compares it with `module`.

    `sample_inputs(size, n)` gives n realistic examples, arrays (n, …) by the module's input names. A file of another
    maker may call inputs and outputs otherwise: then they are taken in order, as far as shapes agree. What an output
    may lose is `parity.TOLERANCE` of the precision that the file's metadata names, else of fp32.

    Raises EdgeVitError when the file cannot be run on the module's inputs at all; a miss is in `failure`.
    """
    path = Path(path)
    verified: list[Verified] = []
    mapping: tuple[str, ...] = ()
    failure: ParityError | None = None
    precision = "fp32"
    for size, session in sessions(path, signature, sizes):
        progress(f"{path.name}: running it at size {size}")
        precision = precision_of(session)
        names = match_names(session, signature, size)
        mapping = names.lines
        try:
            verified += _verify_size(session, module, signature, sample_inputs, size, names)
        except ParityError as error:
            failure = failure or ParityError(f"{path}: {error}")
    if failure is None:
        try:
            parity.check(verified, precision, file=str(path))
        except ParityError as error:
            failure = error
    return Verification(path, precision, tuple(verified), mapping, failure)


def bisect_at(
    path: Path | str,
    module: nn.Module,
    signature: Signature,
    sample_inputs: Callable[[Size, int], Mapping[str, np.ndarray]],
    size: Size,
) -> Bisection:
    """Names the first module whose output differs in the file at `size`; raises as `bisect` does."""
    from converters.bisect import bisect

    path = Path(path)
    session = load(path, size=size)
    names = match_names(session, signature, size)
    inputs = sample_inputs(size, 1 if session.batch == "dynamic" else int(session.batch))
    return bisect(
        path,
        module,
        signature,
        inputs,
        precision=precision_of(session),
        entry_point=size.entry_point,
        file_inputs={theirs: inputs[ours] for ours, theirs in names.inputs.items()},
    )


def sessions(path: Path, signature: Signature, sizes: Sequence[Size]) -> Iterator[tuple[Size, Session]]:
    """The file loaded at each size, by default at those of its metadata. Raises EdgeVitError where none is known."""
    if not sizes:
        sizes = _own_sizes(path, signature)
    for size in sizes:
        signature.check(size)
        yield size, load(path, size=size)


def precision_of(session: Session) -> str:
    named = session.metadata.precision if session.metadata else "fp32"
    return named if named in parity.TOLERANCE else "fp16"


def _own_sizes(path: Path, signature: Signature) -> tuple[Size, ...]:
    from converters.contents import read_contents

    contents = read_contents(path)
    if contents.artifact_text is not None:
        from converters.run import open_artifact

        return open_artifact(path).sizes
    if not signature.dims:
        return (Size(()),)
    sizes = [size for function in contents.functions[:1] if (size := _size_of(function.inputs, signature))]
    if not sizes:
        raise EdgeVitError(f"{path}: does not say which sizes it takes; give --size, such as --size 256")
    return tuple(sizes)


def _size_of(inputs: Sequence[object], signature: Signature) -> Size | None:
    """The size that a file's fixed input shapes stand for."""
    values: dict[str, int] = {}
    for spec, value in zip(signature.inputs, inputs, strict=False):
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) != len(spec.shape):
            return None
        for symbol, length in zip(spec.shape, shape, strict=True):
            if isinstance(symbol, str) and symbol != "batch":
                if length is None:
                    return None
                values[symbol] = length
    wanted = [dim.name for dim in signature.dims]
    return Size(tuple((name, values[name]) for name in wanted)) if set(wanted) <= set(values) else None


def match_names(session: Session, signature: Signature, size: Size) -> NameMap:
    """Raises EdgeVitError where inputs or outputs can be matched neither by name nor by position and shape."""
    inputs = _match(session, session.inputs, signature.inputs, size, "input")
    outputs = _match(session, session.outputs, signature.outputs, size, "output")
    return NameMap(inputs, outputs)


def _match(
    session: Session, ports: Sequence[Port], specs: Sequence[TensorSpec], size: Size, side: str
) -> dict[str, str]:
    names = {port.name for port in ports}
    if all(spec.name in names for spec in specs) and (side == "output" or len(ports) == len(specs)):
        pairs = [(spec, next(port for port in ports if port.name == spec.name)) for spec in specs]
    elif len(ports) == len(specs):
        pairs = list(zip(specs, ports, strict=True))
    else:
        raise EdgeVitError(
            f"{session.path}: has {len(ports)} {side}s ({', '.join(sorted(names))}), the module {len(specs)} "
            f"({', '.join(spec.name for spec in specs)})"
        )
    for spec, port in pairs:
        _check_shape(session, spec, port, size, side)
    return {spec.name: port.name for spec, port in pairs}


def _check_shape(session: Session, spec: TensorSpec, port: Port, size: Size, side: str) -> None:
    known = dict(size.dims)
    wanted = tuple(known.get(d) if isinstance(d, str) else d for d in spec.shape)
    if _agree(wanted, port.shape) or (side == "output" and not port.shape):  # runtimes may not tell an output's shape
        return
    if len(wanted) == 4 and _agree((wanted[0], *wanted[2:], wanted[1]), port.shape):
        raise EdgeVitError(
            f"{session.path}: {side} '{port.name}' is laid out as (N, H, W, C), the module's '{spec.name}' as "
            "(N, C, H, W); give a module that takes the file's layout"
        )
    raise EdgeVitError(
        f"{session.path}: {side} '{port.name}' is {_written(port.shape)}, the module's '{spec.name}' at size {size} "
        f"is {_written(wanted)}"
    )


def _agree(wanted: Sequence[int | None], found: Sequence[int | None]) -> bool:
    return len(wanted) == len(found) and all(None in pair or pair[0] == pair[1] for pair in zip(wanted, found, strict=True))


def _written(shape: Sequence[int | None]) -> str:
    return " × ".join("any" if length is None else str(length) for length in shape)


def _verify_size(
    session: Session,
    module: nn.Module,
    signature: Signature,
    sample_inputs: Callable[[Size, int], Mapping[str, np.ndarray]],
    size: Size,
    names: NameMap,
) -> list[Verified]:
    from converters.wrap import run_module

    batch = EXAMPLES if session.batch == "dynamic" else int(session.batch)
    count = batch * max(1, EXAMPLES // batch)
    inputs = sample_inputs(size, count)
    reference = run_module(module, signature, inputs)
    parity.check_meaningful(reference, size)
    parts = [
        session.run({theirs: inputs[ours][start : start + batch] for ours, theirs in names.inputs.items()})
        for start in range(0, count, batch)
    ]
    actual = {ours: np.concatenate([part[theirs] for part in parts]) for ours, theirs in names.outputs.items()}
    logits = tuple(spec.name for spec in signature.outputs if spec.meaning == "logits")
    return parity.compare(reference, actual, size, logits=logits)
