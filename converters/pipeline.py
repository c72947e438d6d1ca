"""Export: convert into a draft, run the saved draft at every size, compare with the module, and only then name it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters import parity
from converters.artifact import (
    Artifact,
    Golden,
    Metadata,
    Preprocessing,
    Verified,
    written_beside,
)
from converters.errors import EdgeVitError, ParityError, first_line
from converters.plan import FORMATS, Plan, check_arguments, plans
from converters.run import Session, load, open_artifact
from converters.signature import Signature, Size

if TYPE_CHECKING:
    from torch import nn

Arrays = dict[str, np.ndarray]
# Examples asked for; with the golden one they make a batch that no file is traced with, so that a batch baked in shows.
EXAMPLES = 3
# With less than this left, a converter that failed did so for want of space: C++ writers do not say it.
LITTLE_SPACE_BYTES = 1 << 16


def export(
    module: nn.Module,
    signature: Signature,
    *,
    name: str,
    out: Path,
    formats: Sequence[str] = FORMATS,
    sizes: Sequence[Size],
    precision: str | None = None,
    batch: int | str = "dynamic",
    target: str = "ios16",
    sample_inputs: Callable[[Size, int], Arrays],
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] = (),
    source_sha256: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Artifact]:
    """Writes `module` (eval mode) into `out` in each of `formats`, verified at each of `sizes`.

    `sample_inputs(size, n)` gives n realistic examples: arrays (n, …) by input name. `precision` is "fp32" or "fp16";
    None takes each format's own (fp16 for Core ML, else fp32). `batch` is 1 or "dynamic"; TFLite and Core ML files
    always take one example. `target` is the oldest system that a Core ML file runs on. `progress` receives one line
    per step. BatchNorm is folded into the convolutions before it.

    Raises ParityError, and leaves no file of that name, when a file misses `parity.TOLERANCE` at any size or when the
    comparison would prove nothing; EdgeVitError for wrong arguments and what a converter cannot convert. Files that
    were finished before stay.
    """
    out, sizes = Path(out), tuple(dict.fromkeys(sizes))
    check_arguments(signature, formats, sizes, precision, batch, target)
    module = module.eval()
    proof = _proof(module, signature, sizes, sample_inputs)
    folded, flops, parameters = _prepare(module, signature, sizes, proof)
    artifacts = []
    for form in formats:
        for plan in plans(name, form, sizes, precision, batch, target):
            metadata = Metadata(
                model=name,
                format=form,
                precision=plan.precision,
                batch=plan.batch,
                sizes=tuple(map(str, plan.sizes)),
                signature=signature,
                source_sha256=source_sha256,
                versions={},
                preprocessing=preprocessing,
                labels=tuple(labels),
                target=target if form == "coreml" else None,
                flops={str(size): flops[size] for size in plan.sizes},
                parameters=parameters,
            )
            artifacts.append(_write(folded, out / plan.file, plan, metadata, proof, progress))
    return artifacts


@dataclass(frozen=True)
class _Proof:
    """What files are held against at one size: examples (N, …) and the module's outputs for them.

    The last example is the golden one: it goes into the file, so it must be among those that were compared.
    """

    inputs: Arrays
    outputs: Arrays
    logits: tuple[str, ...]

    @property
    def count(self) -> int:
        return EXAMPLES + 1

    def golden(self, size: Size) -> Golden:
        last = slice(EXAMPLES, None)
        return Golden(
            str(size),
            {key: array[last] for key, array in self.inputs.items()},
            {key: array[last] for key, array in self.outputs.items()},
        )


def _proof(
    module: nn.Module, signature: Signature, sizes: Sequence[Size], sample_inputs: Callable[[Size, int], Arrays]
) -> dict[Size, _Proof]:
    """Examples and the module's outputs at every size, computed once for all formats."""
    from converters.wrap import run_module

    proofs = {}
    for size in sizes:
        inputs = {key: np.asarray(array) for key, array in sample_inputs(size, EXAMPLES).items()}
        for spec in signature.inputs:
            expected = spec.resolve(size, EXAMPLES)
            if spec.name not in inputs or inputs[spec.name].shape != expected:
                found = inputs[spec.name].shape if spec.name in inputs else "nothing"
                raise EdgeVitError(f"sample input '{spec.name}' at size {size} must be {expected}, not {found}")
        inputs = {key: np.concatenate([array, _blocky(array[:1])]) for key, array in inputs.items()}
        outputs = run_module(module, signature, inputs)
        parity.check_meaningful(outputs, size)
        logits = tuple(spec.name for spec in signature.outputs if spec.meaning == "logits")
        proofs[size] = _Proof(inputs, outputs, logits)
    return proofs


def _prepare(
    module: nn.Module, signature: Signature, sizes: Sequence[Size], proof: dict[Size, _Proof]
) -> tuple[nn.Module, dict[Size, int], int]:
    """The module as the converters get it, its FLOPs at each size, and its parameters."""
    import torch

    from converters.flops import count_flops, count_parameters
    from converters.quiet import quiet
    from converters.rewrite import fold_batch_norm

    def example(size: Size) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(proof[size].inputs[spec.name][:1].copy()) for spec in signature.inputs)

    with quiet():
        flops = {size: count_flops(module, example(size)) for size in sizes}
        folded = fold_batch_norm(module, example(min(sizes, key=_area)))
    return folded, flops, count_parameters(module)


def _write(
    folded: nn.Module,
    path: Path,
    plan: Plan,
    metadata: Metadata,
    proof: dict[Size, _Proof],
    progress: Callable[[str], None],
) -> Artifact:
    """Converts, embeds, reloads, compares; the draft gets its name when all of that went well."""
    from converters.quiet import quiet

    progress(f"{path.name}: converting for {', '.join(map(str, plan.sizes))}")
    started = time.monotonic()
    smallest = min(plan.sizes, key=_area)
    with written_beside(path) as draft:
        with quiet():
            converter = import_module(f"converters.{plan.format}")
            packages = ("torch", *converter.CONVERTER_PACKAGES, converter.RUNTIME_PACKAGE)
            metadata = replace(
                metadata, golden=proof[smallest].golden(smallest), versions={key: version(key) for key in packages}
            )
            try:
                converter.convert(
                    folded,
                    metadata.signature,
                    plan.sizes,
                    draft,
                    precision=plan.precision,
                    batch=plan.batch,
                    **plan.options,
                )
            except EdgeVitError:
                raise
            except Exception as error:  # converters raise whatever they like
                raise _converter_error(error, path, plan) from error
            converter.embed(draft, metadata.to_json())
        progress(f"{path.name}: converted in {time.monotonic() - started:.0f} s; running it at every size")
        verified = [item for size in plan.sizes for item in _verify(draft, path, size, plan, proof[size])]
        parity.check(verified, plan.precision, file=path.name)
        metadata = replace(metadata, verified=tuple(verified))
        converter.embed(draft, metadata.to_json())
        _check_final(draft, path, smallest, plan, proof[smallest], metadata)
    progress(f"{path.name}: checked, {time.monotonic() - started:.0f} s in all")
    return Artifact(path, metadata)


def _converter_error(error: BaseException, path: Path, plan: Plan) -> Exception:
    """One line from the bottom of a converter's chain of exceptions; a full disk is told as what it is."""
    root = error
    while cause := root.__cause__ or root.__context__:
        root = cause
    if isinstance(root, OSError) and root.errno:
        return root
    if shutil.disk_usage(path.parent).free < LITTLE_SPACE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return EdgeVitError(f"{path.name}: the {plan.format} converter failed: {first_line(root)}")


def _verify(draft: Path, path: Path, size: Size, plan: Plan, proof: _Proof) -> list[Verified]:
    """The worst comparison of each output at one size: in the file's batch and, where that is free, one by one too."""
    try:
        session = load(draft, size=size)
        if session.batch != plan.batch:
            raise ParityError(f"takes batch {session.batch} at size {size}, not {plan.batch}")
        batches = (1, proof.count) if plan.batch == "dynamic" else (int(plan.batch),)
        compared = [
            parity.compare(proof.outputs, _run_in_batches(session, proof.inputs, batch), size, logits=proof.logits)
            for batch in batches
        ]
    except ParityError as error:
        raise ParityError(f"{path.name}: {error}") from error
    except EdgeVitError as error:
        reason = str(error).replace(f"{draft}: ", "")
        raise ParityError(f"{path.name}: cannot be run at size {size}: {reason}") from error
    return [parity.worst(same_output) for same_output in zip(*compared, strict=True)]


def _check_final(draft: Path, path: Path, size: Size, plan: Plan, proof: _Proof, metadata: Metadata) -> None:
    """What gets the name, with its last metadata inside, still says what was meant and still runs."""
    if open_artifact(draft).metadata.to_json() != metadata.to_json():
        raise ParityError(f"{path.name}: its metadata does not come back as it was written")
    parity.check(_verify(draft, path, size, plan, proof), plan.precision, file=path.name)


def _run_in_batches(session: Session, inputs: Arrays, batch: int) -> Arrays:
    """Runs (N, …) inputs `batch` at a time and joins the outputs."""
    count = len(next(iter(inputs.values())))
    parts = [
        session.run({key: array[start : start + batch] for key, array in inputs.items()})
        for start in range(0, count, batch)
    ]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _blocky(array: np.ndarray, blocks: int = 16) -> np.ndarray:
    """A picture (1, C, H, W) in at most 16 × 16 blocks, so that it packs into few bytes; anything else unchanged."""
    if array.ndim != 4 or array.dtype.kind != "f":
        return array.copy()
    rows, columns = ((np.arange(side) * blocks // side * side + side // 2) // blocks for side in array.shape[2:])
    return np.ascontiguousarray(array[:, :, rows][:, :, :, columns])


def _area(size: Size) -> int:
    return int(np.prod([value for _, value in size.dims]))
