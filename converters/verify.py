"""A saved file against its module, at every size that it offers: the promise of an export, kept later and elsewhere."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converters import parity
from converters.artifact import Preprocessing, Verified
from converters.contents import Contents, Value, read_contents
from converters.errors import EdgeVitError, ParityError
from converters.run import Port, Session, load, open_artifact
from converters.signature import Signature, Size, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from converters.bisect import Bisection
    from converters.proof import Proof, SampleInputs, Subject


@dataclass(frozen=True)
class Verification:
    """`failure` is None where every output at every size keeps the tolerance of `precision`."""

    path: Path
    precision: str
    verified: tuple[Verified, ...]
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]  # what was assumed, one line each
    failure: ParityError | None
    incomparable: Size | None = None  # the first at which an output was missing, not finite or of another shape

    @property
    def worst_size(self) -> Size:
        """Where a fault is best looked for."""
        return self.incomparable or Size.parse(parity.worst(self.verified).size)


@dataclass(frozen=True)
class NameMap:
    """The file's names by the module's."""

    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        sides = (("input", self.inputs), ("output", self.outputs))
        return tuple(
            f"the file's {side} '{theirs}' is taken for the module's '{ours}', by position and shape"
            for side, names in sides
            for ours, theirs in names.items()
            if ours != theirs
        )

    def call(self, session: Session) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        """`session.run` with the module's names."""

        def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            outputs = session.run(self.of_file(inputs))
            return {ours: outputs[theirs] for ours, theirs in self.outputs.items()}

        return run

    def of_file(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {theirs: inputs[ours] for ours, theirs in self.inputs.items()}


def verify(
    path: Path | str,
    module: nn.Module,
    signature: Signature,
    sample_inputs: SampleInputs,
    *,
    sizes: Sequence[Size] = (),
    preprocessing: Preprocessing | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Runs the file at `path` at each of `sizes` (by default all that it names) and compares it with `module`.

    `sample_inputs(size, n)` gives n realistic examples, arrays (n, …) by the module's input names. A file that takes
    pictures needs the module's `preprocessing`. A file of another maker may call its inputs and outputs otherwise:
    then they are taken in order, as far as shapes agree, and `notes` say so. What an output may lose is
    `parity.TOLERANCE` of the precision that the file's metadata names (of fp16 where it names another, such as int8),
    and of fp32 where it names none or most weights are float32 whatever it says.

    Raises EdgeVitError when the file cannot be run on the module's inputs at all, ParityError when the module's own
    outputs would prove nothing; a file that misses its tolerance is told in `failure`.
    """
    path = Path(path)
    contents = read_contents(path)
    subject = _subject(contents, module, signature, preprocessing)
    sizes = tuple(sizes) or sizes_of(contents, subject.file_signature)
    precision = _precision(contents)
    verified: list[Verified] = []
    notes: tuple[str, ...] = ()
    failure: ParityError | None = None
    incomparable: Size | None = None
    for size in sizes:
        progress(f"{path.name}: running it at size {size}")
        session, names, proof = _loaded(path, size, subject, sample_inputs)
        notes = names.notes
        batch = proof.count if session.batch == "dynamic" else int(session.batch)
        batch = batch if signature.batched else 1
        if proof.count % batch:
            raise EdgeVitError(
                f"{path}: takes {batch} examples at a time, and {proof.count} are compared; not supported"
            )
        try:
            verified += proof.compare(names.call(session), batch, size)
        except ParityError as error:
            failure = failure or ParityError(f"{path}: {error}")
            incomparable = incomparable or size
    if failure is None:
        try:
            parity.check(verified, precision, file=str(path))
        except ParityError as error:
            failure = error
    return Verification(path, precision, tuple(verified), sizes, notes, failure, incomparable)


def bisect_at(
    path: Path | str,
    module: nn.Module,
    signature: Signature,
    sample_inputs: SampleInputs,
    size: Size,
    *,
    preprocessing: Preprocessing | None = None,
) -> Bisection:
    """Names the first module whose output differs in the file at `size`. Raises as `verify` and `bisect` do."""
    from converters.bisect import bisect

    path = Path(path)
    contents = read_contents(path)
    subject = _subject(contents, module, signature, preprocessing)
    session, names, proof = _loaded(path, size, subject, sample_inputs)
    inputs = proof.example()
    return bisect(
        path,
        subject.wrapped(module),
        subject.file_signature,
        inputs,
        precision=_precision(contents),
        entry_point=size.entry_point,
        file_inputs=session.taken(names.of_file(inputs)),
    )


def sizes_of(contents: Contents, signature: Signature) -> tuple[Size, ...]:
    """Those of edgevit's metadata, else what the file's fixed shapes say. Raises EdgeVitError where neither does."""
    if contents.artifact_text is not None:
        return open_artifact(contents.path).sizes
    size = _size_of(contents.functions[0].inputs, signature)
    if size is None:
        raise EdgeVitError(f"{contents.path}: does not say which sizes it takes; give them, such as --size 256")
    return (size,)


def _subject(
    contents: Contents, module: nn.Module, signature: Signature, preprocessing: Preprocessing | None
) -> Subject:
    """The module as the file takes it: behind pictures where the file takes these."""
    from converters.proof import Subject

    if contents.artifact_text is None:
        return Subject(module.eval(), signature, None)
    taken = open_artifact(contents.path).metadata.signature.inputs
    if not (taken and taken[0].meaning == "image" and taken[0].dtype == "uint8"):
        return Subject(module.eval(), signature, None)
    if preprocessing is None:
        raise EdgeVitError(f"{contents.path}: takes pictures; give the module's preprocessing")
    return Subject(module.eval(), signature, preprocessing)


def _precision(contents: Contents) -> str:
    """What the metadata names, if the weights bear it out: a claim alone must not widen what a file may lose."""
    if contents.artifact_text is None:
        return "fp32"
    counts = collections.Counter[str]()
    for weight in contents.weights:
        counts["float32" if weight.dtype == "float32" and not weight.compression else "fewer bits"] += weight.count
    named = open_artifact(contents.path).metadata.precision
    if named == "fp32" or counts["float32"] > counts["fewer bits"]:
        return "fp32"
    return named if named in parity.TOLERANCE else "fp16"


def _loaded(path: Path, size: Size, subject: Subject, sample_inputs: SampleInputs) -> tuple[Session, NameMap, Proof]:
    from converters.proof import proofs

    subject.signature.check(size)
    session = load(path, size=size)
    names = match_names(session, subject.file_signature, size)
    return session, names, proofs(subject, (size,), sample_inputs, "dynamic" if subject.signature.batched else 1)[size]


def match_names(session: Session, signature: Signature, size: Size) -> NameMap:
    """Raises EdgeVitError where inputs or outputs can be matched neither by name nor by position and shape."""
    return NameMap(
        _match(session, session.inputs, signature.inputs, size, "input"),
        _match(session, session.outputs, signature.outputs, size, "output"),
    )


def _match(
    session: Session, ports: Sequence[Port], specs: Sequence[TensorSpec], size: Size, side: str
) -> dict[str, str]:
    by_name = {port.name: port for port in ports}
    if all(spec.name in by_name for spec in specs) and (side == "output" or len(ports) == len(specs)):
        pairs = [(spec, by_name[spec.name]) for spec in specs]
    elif len(ports) == len(specs):
        pairs = list(zip(specs, ports, strict=True))
    else:
        raise EdgeVitError(
            f"{session.path}: has {len(ports)} {side}s ({', '.join(by_name)}), the module {len(specs)} "
            f"({', '.join(spec.name for spec in specs)})"
        )
    for spec, port in pairs:
        _check_shape(session, spec, port, size, side)
    return {spec.name: port.name for spec, port in pairs}


def _check_shape(session: Session, spec: TensorSpec, port: Port, size: Size, side: str) -> None:
    known = dict(size.dims)
    wanted = tuple(known.get(length) if isinstance(length, str) else length for length in spec.shape)
    if _agree(wanted, port.shape) or (side == "output" and not port.shape):  # a runtime may not tell an output's shape
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
    if len(wanted) != len(found):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(wanted, found, strict=True))


def _written(shape: Sequence[int | None]) -> str:
    return " × ".join("any" if length is None else str(length) for length in shape)


def _size_of(inputs: Sequence[Value], signature: Signature) -> Size | None:
    """The size that a file's fixed input shapes stand for; None where they leave it open."""
    values: dict[str, int | None] = {}
    for spec, value in zip(signature.inputs, inputs, strict=False):
        if value.shape is not None and len(value.shape) == len(spec.shape):
            values |= {d: length for d, length in zip(spec.shape, value.shape, strict=True) if isinstance(d, str)}
    dims = [(dim.name, values.get(dim.name)) for dim in signature.dims]
    known = tuple((name, length) for name, length in dims if length is not None)
    return Size(known) if len(known) == len(dims) else None
