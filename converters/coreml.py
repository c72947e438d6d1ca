"""Core ML: an ML program in a `.mlpackage`, one per size, or one with a function per size (iOS 18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from converters.artifact import METADATA_KEY
from converters.coreml_precision import LARGEST, Reference, Search, largest
from converters.coreml_program import Traced, trace, write
from converters.errors import EdgeVitError
from converters.mil import Program
from converters.mil_package import ValueType, Weights, class_labels, read_spec, value_type
from converters.mil_ports import feature_type
from converters.parity import TOLERANCE
from converters.quiet import quiet
from converters.signature import Signature, Size

with quiet():  # it complains about this torch, and on Linux about the missing framework
    import coremltools as ct
    from coremltools.proto import MIL_pb2, Model_pb2
    from google.protobuf.message import DecodeError

CONVERTER_PACKAGES = ("coremltools",)
RUNTIME_PACKAGE = "coremltools"
MAIN = "main"  # the function of a package that has one
FORESEEN = (0.75, 0.4)  # of the tolerance: what the search aims at, first and if that was not enough
FP32_ONLY = ("lstm", "gru", "rnn")  # before iOS 17 Core ML has these in fp32 alone
LARGEST_HALF = 65504.0


def convert(
    module: nn.Module,
    signature: Signature,
    sizes: Sequence[Size],
    draft: Path,
    *,
    precision: str,
    batch: int | str,
    samples: Mapping[Size, Mapping[str, np.ndarray]],
    target: str | None = None,
    labels: Sequence[str] = (),
    debug_info: bool = False,
) -> list[str]:
    """Writes `draft`: for several sizes (`ios18` only) one function each, named `Size.entry_point`.

    The first size is the default function. Weights that functions share are stored once. With precision "fp16" the
    arithmetic is float16, but for ops whose values on `samples` (arrays (N, …) by size and input name) come near its
    end, or without which the outputs would miss the tolerance: the notes that are returned say how many those are.
    Inputs and outputs stay float32. A `PictureInput` becomes an image input; with `labels` a classifier.
    """
    if truths := [spec.name for spec in signature.outputs if spec.dtype == "bool"]:
        raise EdgeVitError(
            f"coreml: output '{truths[0]}' holds truth values, which Core ML has no outputs of; return whole numbers "
            "instead, or leave this format out"
        )
    count = 1 if batch == "dynamic" else int(batch)
    target = target or "ios16"
    if len(sizes) > 1 and target != "ios18":
        raise EdgeVitError(f"coreml: several sizes in one package need target ios18, not {target}")
    parts = {size: draft.with_name(f"{size.entry_point}.mlpackage") for size in sizes}
    if len(sizes) == 1:
        parts = {sizes[0]: draft}
    traced = {size: trace(module, signature, size, count, labels) for size in sizes}
    notes: list[str] = []
    if precision == "fp16":
        references = {size: Reference.of(module, signature, size, samples[size]) for size in sizes}
        notes = _write_half(traced, parts, references, target)
    else:
        for size, path in parts.items():
            write(traced[size], path, target=target, half=False)
    if len(sizes) > 1:
        _combine(parts, draft)
    return notes


def _write_half(
    traced: dict[Size, Traced], parts: dict[Size, Path], references: dict[Size, Reference], target: str
) -> list[str]:
    """Writes every size with the same ops in fp32: those that any size needs. Returns the notes about them."""
    kept: dict[str, str] = {}
    written: dict[Size, int] = {}

    def write_now(size: Size) -> Program:
        write(traced[size], parts[size], target=target, half=True, kept=kept)
        written[size] = len(kept)
        return Program(parts[size])

    without = 0.0  # the largest error that was met without them
    for size in parts:
        program, search = write_now(size), None
        for share in FORESEEN:
            too_large = max(largest(program, references[size]).values(), default=0.0) > LARGEST and not kept
            error = references[size].error(program)
            if error <= TOLERANCE["fp16"] and not too_large:
                break
            without = max(without, error)
            search = search or Search.of(traced[size], target, references[size], parts[size].parent)
            kept = search.out_of_range() | kept
            kept |= dict.fromkeys(search.sensitive(kept, share * TOLERANCE["fp16"]), "")
            program = write_now(size)
    for size, number in written.items():
        if number != len(kept):
            write_now(size)
    for path in parts.values():
        _check_weights(path, kept)
    return _notes(kept, without, Program(next(iter(parts.values()))))


def _notes(kept: Mapping[str, str], without: float, program: Program) -> list[str]:
    every = [op for op in program.ops() if op.kind not in ("cast", "classify")]
    single = [op for op in every if any(name in kept for name in op.outputs)]
    if not single:
        return []
    reasons = [reason for reason in kept.values() if " reaches " in reason]
    sensitive = sum(1 for reason in kept.values() if not reason)
    words = []
    if reasons:
        words.append(reasons[0] + (f", as do {len(reasons) - 1} more" if len(reasons) > 1 else ""))
    if sensitive:
        words.append(f"in fp16 the outputs would be off by {without:.2g} of their standard deviation")
    return [f"{len(single)} of {len(every)} ops kept in fp32, so they leave the Neural Engine: {'; '.join(words)}"]


def _check_weights(path: Path, kept: Mapping[str, str]) -> None:
    """Raises EdgeVitError when weights of an fp16 program are stored in fp32 without need."""
    spec, weights = read_spec(path), Weights(path)
    for function in spec.mlProgram.functions.values():
        stored: dict[str, Any] = {}
        for op in function.block_specializations[function.opset].operations:
            if op.type == "const":
                stored[op.outputs[0].name] = op.attributes["val"]
                continue
            if op.type in FP32_ONLY or any(item.name in kept for item in op.outputs):
                continue
            for binding in (item for given in op.inputs.values() for item in given.arguments):
                value = binding.value if binding.WhichOneof("binding") == "value" else stored.get(binding.name)
                if value is None or value.WhichOneof("value") != "blobFileValue":
                    continue
                array = weights.constant(value, f"{path}: weights of {op.outputs[0].name!r}")
                single = value.type.tensorType.dataType == MIL_pb2.FLOAT32
                if single and isinstance(array, np.ndarray) and np.abs(array).max(initial=0.0) <= LARGEST_HALF:
                    raise EdgeVitError(f"{path.name}: the weights of {op.type} '{op.outputs[0].name}' are still fp32")


def _combine(parts: dict[Size, Path], draft: Path) -> None:
    """One package with a function for each size; the first is the default."""
    descriptor = ct.utils.MultiFunctionDescriptor()
    for size, path in parts.items():
        descriptor.add_function(str(path), src_function_name=MAIN, target_function_name=size.entry_point)
    descriptor.default_function_name = next(iter(parts)).entry_point
    ct.utils.save_multifunction(descriptor, str(draft))


def embed(draft: Path, text: str) -> None:
    """Puts metadata into the specification's user-defined metadata (after functions were combined: that drops it)."""
    file = specification_file(draft)
    spec = parse_specification(file, draft)
    spec.description.metadata.userDefined[METADATA_KEY] = text
    file.write_bytes(spec.SerializeToString())


def read(path: Path) -> str | None:
    """The metadata of a package, None where it has none. Raises EdgeVitError when it is no Core ML package."""
    return dict(parse_specification(specification_file(path), path).description.metadata.userDefined).get(METADATA_KEY)


Ports = tuple[dict[str, ValueType], dict[str, ValueType]]


def describe(path: Path) -> dict[str, Ports]:
    """For each function, shapes and dtypes of its inputs and of its outputs by name, as `mil.Program` has them.

    Pictures are uint8 (1, H, W, 3), RGB. A classifier gives its label, "str" (1,), and probabilities (1, K).
    """
    spec = parse_specification(specification_file(path), path)
    functions = {item.name: item for item in spec.description.functions} or {MAIN: spec.description}
    return {name: _ports(item, spec.mlProgram.functions.get(name)) for name, item in functions.items()}


def _ports(description: Any, function: Any) -> Ports:
    labels: list[str] = []
    declared: dict[str, ValueType] = {}
    if function is not None:
        block = function.block_specializations[function.opset]
        for op in block.operations:
            made = [item for item in op.outputs if item.name in block.outputs and op.type != "classify"]
            declared |= {item.name: value_type(item, "output") for item in made}
            if op.type == "classify":
                labels = class_labels(op.inputs["classes"].arguments[0].value)
    inputs = {item.name: feature_type(item) for item in description.input}
    return inputs, {item.name: feature_type(item, labels, declared.get(item.name)) for item in description.output}


def specification_file(path: Path) -> Path:
    """The file of a package that holds its program. Raises EdgeVitError when there is none."""
    files = sorted(path.glob("Data/*/*.mlmodel")) if path.is_dir() else []
    if len(files) != 1:
        raise EdgeVitError(f"{path}: not a Core ML package (a folder with Manifest.json and one .mlmodel inside)")
    return files[0]


def parse_specification(file: Path, path: Path) -> Any:
    """`file` of the package `path` as coremltools' Model. Raises EdgeVitError for damage and for what is no program."""
    spec = Model_pb2.Model()
    try:
        spec.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise EdgeVitError(f"{path}: a damaged Core ML package: {file.name} cannot be read") from error
    if spec.WhichOneof("Type") != "mlProgram":
        raise EdgeVitError(f"{path}: holds no ML program; other kinds of Core ML models are not read here")
    return spec
