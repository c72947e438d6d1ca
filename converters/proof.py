"""What every file of an export is held against: realistic examples at each size, and the module's outputs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from converters import parity
from converters.artifact import Golden, Preprocessing, Verified
from converters.errors import EdgeVitError, first_line
from converters.picture import PictureInput, picture_signature, to_pictures
from converters.plan import unlisted
from converters.signature import Signature, Size
from converters.wrap import run_module

Arrays = dict[str, np.ndarray]
SampleInputs = Callable[[Size, int], Arrays]
# Examples asked for; with the golden one they make a batch that no file is traced with, so that a batch baked in shows.
EXAMPLES = 3


@dataclass(frozen=True)
class Subject:
    """The module as it came, and the preprocessing that goes inside where files take pictures."""

    module: nn.Module
    signature: Signature
    inside: Preprocessing | None

    @property
    def file_signature(self) -> Signature:
        return picture_signature(self.signature) if self.inside else self.signature

    def wrapped(self, module: nn.Module) -> nn.Module:
        """`module`, or what stands for it, with the inputs and outputs that files have."""
        return PictureInput(module, self.inside, self.signature).eval() if self.inside else module

    def file_inputs(self, inputs: Arrays) -> Arrays:
        return to_pictures(inputs, self.inside) if self.inside else inputs


@dataclass(frozen=True)
class Proof:
    """What files are held against at one size: N examples, stacked, and the module's outputs for them.

    The last example is the golden one: it goes into the file, so it must be among those that were compared.
    """

    inputs: Arrays
    outputs: Arrays
    signature: Signature

    @property
    def count(self) -> int:
        return EXAMPLES + 1

    def compare(self, call: Callable[[Arrays], Arrays], batch: int, size: Size) -> list[Verified]:
        """How closely `call`, given `batch` examples at a time, agrees with the module."""
        return parity.compare(
            self.outputs,
            _called(call, self.inputs, batch, self.signature),
            size,
            logits=_meaning(self.signature, "logits"),
            probabilities=_meaning(self.signature, "probabilities"),
        )

    def example(self) -> Arrays:
        """The first example, as a file of batch 1 takes it."""
        return _picked(self.inputs, 0, self.signature)

    def golden(self, size: Size) -> Golden:
        return Golden(
            str(size),
            _picked(self.inputs, EXAMPLES, self.signature),
            _picked(self.outputs, EXAMPLES, self.signature),
        )


def proofs(source: Subject, sizes: Sequence[Size], sample_inputs: SampleInputs, batch: int | str) -> dict[Size, Proof]:
    """Examples and the module's outputs at every size, computed once for all formats.

    With `batch` 1 the module sees one example at a time: it may not know what to do with more.
    """
    found: dict[Size, Proof] = {}
    signature, module = source.file_signature, source.wrapped(source.module)
    for size in sizes:
        inputs = source.file_inputs(_examples(source.signature, size, sample_inputs))
        count = EXAMPLES + 1 if batch == "dynamic" else 1
        try:
            outputs = _called(lambda arrays: run_module(module, signature, arrays), inputs, count, signature)
        except EdgeVitError:
            raise
        except Exception as error:  # a stranger's module raises whatever it likes
            raise EdgeVitError(f"the module itself fails at size {size}: {first_line(error)}") from error
        parity.check_meaningful(outputs, size, probabilities=_meaning(signature, "probabilities"))
        found[size] = Proof(inputs, outputs, signature)
    return found


def unlisted_proofs(
    source: Subject,
    sizes: Sequence[Size],
    sample_inputs: SampleInputs,
    batch: int | str,
    progress: Callable[[str], None],
) -> dict[Size, Proof]:
    """What a dynamic file is held against at sizes that nobody listed, where the module itself can run at them."""
    found: dict[Size, Proof] = {}
    for size in unlisted(source.signature, sizes):
        try:
            found |= proofs(source, (size,), sample_inputs, batch)
        except EdgeVitError as error:
            progress(f"note: no proof at the unlisted size {size}: {error}")
    return found


def _examples(signature: Signature, size: Size, sample_inputs: SampleInputs) -> Arrays:
    """EXAMPLES examples of each input, stacked, and the golden one."""
    inputs = {key: np.asarray(array) for key, array in sample_inputs(size, EXAMPLES).items()}
    for spec in signature.inputs:
        expected = spec.resolve(size, EXAMPLES) if signature.batched else (EXAMPLES, *spec.resolve(size))
        if spec.name not in inputs or inputs[spec.name].shape != expected:
            found = inputs[spec.name].shape if spec.name in inputs else "nothing"
            raise EdgeVitError(f"sample input '{spec.name}' at size {size} must be {expected}, not {found}")
    return {key: np.concatenate([array, _blocky(array[:1])]) for key, array in inputs.items()}


def _called(call: Callable[[Arrays], Arrays], inputs: Arrays, batch: int, signature: Signature) -> Arrays:
    """Outputs for all examples, stacked; without a batch dimension they go through one by one."""
    count = len(next(iter(inputs.values())))
    if not signature.batched:
        rows = [call(_picked(inputs, number, signature)) for number in range(count)]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    parts = [
        call({key: array[start : start + batch] for key, array in inputs.items()}) for start in range(0, count, batch)
    ]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _picked(arrays: Arrays, number: int, signature: Signature) -> Arrays:
    where = slice(number, number + 1) if signature.batched else number
    return {key: array[where] for key, array in arrays.items()}


def _blocky(array: np.ndarray, blocks: int = 16) -> np.ndarray:
    """A picture (1, C, H, W) in at most 16 × 16 blocks, so that it packs into few bytes; anything else unchanged."""
    if array.ndim != 4 or array.dtype.kind != "f":
        return array.copy()
    rows, columns = ((np.arange(side) * blocks // side * side + side // 2) // blocks for side in array.shape[2:])
    return np.ascontiguousarray(array[:, :, rows][:, :, :, columns])


def _meaning(signature: Signature, meaning: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in signature.outputs if spec.meaning == meaning)
