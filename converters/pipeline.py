"""Export: convert into a draft, run the saved draft at every size, compare with the module, and only then name it."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn

from converters import parity
from converters.artifact import Artifact, Metadata, Preprocessing, Verified, written_beside
from converters.errors import EdgeVitError, ParityError, first_line
from converters.flops import count_flops, count_parameters
from converters.picture import from_pictures
from converters.plan import FORMATS, INPUTS, Plan, check_arguments, plans
from converters.proof import Arrays, Proof, SampleInputs, Subject, proofs, unlisted_proofs
from converters.quiet import quiet
from converters.rewrite import prepare
from converters.run import load, open_artifact
from converters.signature import Signature, Size
from converters.unsupported import unsupported

# With less than this left, a converter that failed did so for want of space: C++ writers do not say it.
LITTLE_SPACE_BYTES = 1 << 16


def export(
    module: nn.Module,
    signature: Signature,
    *,
    name: str,
    out: Path,
    formats: Sequence[str] = FORMATS,
    sizes: Sequence[Size] = (Size(()),),
    precision: str | None = None,
    batch: int | str = "dynamic",
    target: str = "ios16",
    static: bool = False,
    input: str = "tensor",
    sample_inputs: SampleInputs,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] = (),
    source_sha256: str = "",
    rewrites: Sequence[str] | None = None,
    debug_info: bool = False,
    keep_failed: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Artifact]:
    """Writes `module` (eval mode) into `out` in each of `formats`, verified at each of `sizes`.

    `sample_inputs(size, n)` gives n realistic examples: arrays (n, …) by input name. `precision` is "fp32" or "fp16";
    None takes each format's own (fp16 for Core ML, else fp32). `batch` is 1 or "dynamic"; TFLite and Core ML files
    always take one example. `target` is the oldest system that a Core ML file runs on. With `static` each size has a
    file of its own. With `input` "image" the files take uint8 pictures (N, H, W, 3) and do the work of
    `preprocessing` inside (`converters.picture`). `rewrites` names those of `converters.rewrite` to apply; None takes
    what pays in each format. `debug_info` keeps the exporter's node metadata. `progress` receives one line per step.

    Raises ParityError, and leaves no file of that name, when a file misses `parity.TOLERANCE` at any size or when the
    comparison would prove nothing; with `keep_failed` the file stays as NAME.unverified. Raises EdgeVitError for wrong
    arguments and what a converter cannot convert. Files that were finished before stay.
    """
    out, sizes, formats = Path(out), tuple(dict.fromkeys(sizes)), tuple(dict.fromkeys(formats))
    if input not in INPUTS:
        raise EdgeVitError(f"input '{input}': choose from {', '.join(INPUTS)}")
    check_arguments(signature, formats, sizes, precision, batch, target, labels)
    source = Subject(_checked_module(module), signature, preprocessing if input == "image" else None)
    if input == "image" and preprocessing is None:
        raise EdgeVitError("input image: the preprocessing is not known, so it cannot be put inside")
    batch = batch if signature.batched else 1
    proof = proofs(source, sizes, sample_inputs, batch)
    files = functools.partial(
        plans, name, static=static, picture=input == "image", default=preprocessing.size if preprocessing else ""
    )
    work = [(form, list(files(form, sizes, precision, batch, target))) for form in formats]
    if any(len(plan.sizes) > 1 for form, planned in work if form == "onnx" for plan in planned):
        proof |= unlisted_proofs(source, sizes, sample_inputs, batch, progress)
    flops, parameters = _cost(source, sizes, proof)
    artifacts = []
    for form, planned in work:
        converted = _prepared(source, form, proof[min(sizes, key=_area)], rewrites)
        for plan in planned:
            metadata = Metadata(
                model=name,
                format=form,
                precision=plan.precision,
                batch=plan.batch,
                sizes=tuple(str(size) for size in sizes if size in plan.sizes),
                signature=source.file_signature,
                source_sha256=source_sha256,
                versions={},
                preprocessing=preprocessing,
                labels=tuple(labels),
                target=target if form == "coreml" else None,
                flops={str(size): flops[size] for size in plan.sizes},
                parameters=parameters,
            )
            artifacts.append(
                _write(converted, out / plan.file, plan, metadata, proof, debug_info, keep_failed, progress)
            )
    return artifacts


def _checked_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise EdgeVitError(f"export takes a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise EdgeVitError("a TorchScript module cannot be traced; give the module that it was made of")
    return module.eval()


def _cost(source: Subject, sizes: Sequence[Size], proof: dict[Size, Proof]) -> tuple[dict[Size, int], int]:
    """FLOPs at each size, batch 1, and parameters."""
    module = source.wrapped(source.module)
    with quiet():
        flops = {size: count_flops(module, _tensors(proof[size].example(), source.file_signature)) for size in sizes}
    return flops, count_parameters(source.module)


def _prepared(source: Subject, form: str, smallest: Proof, rewrites: Sequence[str] | None) -> nn.Module:
    """The module as a format's converter gets it."""
    inputs = smallest.example()
    if source.inside:
        inputs = from_pictures(inputs, source.inside)
    with quiet():
        module = prepare(source.module, form, _tensors(inputs, source.signature), rewrites=rewrites)
    return source.wrapped(module)


def _tensors(inputs: Arrays, signature: Signature) -> tuple[torch.Tensor, ...]:
    """Arrays by name as forward's arguments."""
    return tuple(torch.from_numpy(np.array(inputs[spec.name])) for spec in signature.inputs)


def _write(
    module: nn.Module,
    path: Path,
    plan: Plan,
    metadata: Metadata,
    proof: dict[Size, Proof],
    debug_info: bool,
    keep_failed: bool,
    progress: Callable[[str], None],
) -> Artifact:
    """Converts, embeds, reloads, compares; the draft gets its name when all of that went well."""
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
                notes = converter.convert(
                    module,
                    metadata.signature,
                    plan.sizes,
                    draft,
                    precision=plan.precision,
                    batch=plan.batch,
                    samples={size: proof[size].inputs for size in plan.sizes},
                    target=metadata.target,
                    labels=metadata.labels,
                    debug_info=debug_info,
                )
            except EdgeVitError:
                raise
            except Exception as error:  # converters raise whatever they like
                raise _converter_error(error, path, plan) from error
            metadata = replace(metadata, notes=tuple(notes))
            converter.embed(draft, metadata.to_json())
        for note in notes:
            progress(f"{path.name}: note: {note}")
        progress(f"{path.name}: converted in {time.monotonic() - started:.0f} s; running it at every size")
        try:
            # A dynamic file holds for the sizes in between too.
            dynamic = len(plan.sizes) > 1 and plan.format == "onnx"
            sizes = [size for size in proof if dynamic or size in plan.sizes]
            verified = [item for size in sizes for item in _verify(draft, path, size, plan, proof[size])]
            parity.check(verified, plan.precision, file=path.name)
            metadata = replace(metadata, verified=tuple(verified))
            converter.embed(draft, metadata.to_json())
            _check_final(draft, path, smallest, plan, proof[smallest], metadata)
        except ParityError as error:
            if not keep_failed:
                raise
            kept = path.with_name(f"{path.name}.unverified")
            with written_beside(kept) as failed:
                draft.rename(failed)
            raise ParityError(f"{error}; kept as {kept}") from error
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
    refusal = unsupported(error, plan.format)
    return refusal or EdgeVitError(f"{path.name}: the {plan.format} converter failed: {first_line(root)}")


def _verify(draft: Path, path: Path, size: Size, plan: Plan, proof: Proof) -> list[Verified]:
    """The worst comparison of each output at one size: in the file's batch and, where that is free, one by one too."""
    try:
        session = load(draft, size=size)
        if proof.signature.batched and session.batch != plan.batch:
            raise ParityError(f"takes batch {session.batch} at size {size}, not {plan.batch}")
        batches = (1, proof.count) if plan.batch == "dynamic" else (int(plan.batch),)
        compared = [proof.compare(session.run, batch, size) for batch in batches]
    except ParityError as error:
        raise ParityError(f"{path.name}: {error}") from error
    except EdgeVitError as error:
        reason = str(error).replace(f"{draft}: ", "")
        raise ParityError(f"{path.name}: cannot be run at size {size}: {reason}") from error
    return [parity.worst(same_output) for same_output in zip(*compared, strict=True)]


def _check_final(draft: Path, path: Path, size: Size, plan: Plan, proof: Proof, metadata: Metadata) -> None:
    """What gets the name, with its last metadata inside, still says what was meant and still runs."""
    if open_artifact(draft).metadata.to_json() != metadata.to_json():
        raise ParityError(f"{path.name}: its metadata does not come back as it was written")
    parity.check(_verify(draft, path, size, plan, proof), plan.precision, file=path.name)


def _area(size: Size) -> int:
    return int(np.prod([value for _, value in size.dims]))
