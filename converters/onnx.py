"""ONNX: one file for every size, through torch's exporter. Runs in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from torch import nn

from converters.artifact import METADATA_KEY
from converters.errors import EdgeVitError
from converters.signature import Dim, Signature, Size
from converters.unsupported import baked, refuse_large, unsupported, untraceable
from converters.wrap import Named, zero_inputs

OPSET = 18
FEW_UNITS = 4  # of a dimension that steps: with 32 a picture of 128, whose last map has two patches
CONVERTER_PACKAGES = ("onnx", "onnxscript")
RUNTIME_PACKAGE = "onnxruntime"


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
    """Writes `draft`: height and width fixed when there is one size, symbolic when there are several.

    `batch` is a number or "dynamic". "fp16" keeps float32 inputs and outputs, and float32 for ops whose values on
    `samples` (arrays (N, …) by size and input name) come near float16's limit; the notes say so. The node metadata of
    torch's exporter (stack traces with paths of this machine, a fifth of a small model's file) stays with
    `debug_info` only. Raises EdgeVitError naming the operation, module and line that cannot be converted.
    """
    from converters.onnx_fp16 import to_half
    from converters.onnx_graph import tidy

    refuse_large(module, "onnx")
    symbols = _symbols(signature, sizes, batch)
    program = _trace(module, signature, sizes, symbols, 2 if batch == "dynamic" else int(batch))
    try:
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
            verbose=False,
        )
    except Exception as error:  # the exporter raises whatever it likes
        if (refusal := unsupported(error, "onnx")) is not None:
            raise refusal from error
        raise
    assert exported is not None
    tidy(exported.model)
    model, notes = exported.model_proto, list[str]()
    _name_dimensions(model, signature, set(symbols))
    if precision == "fp16":
        model, notes = to_half(model, (samples[size] for size in sizes if size in samples))
    if not debug_info:
        _strip(model, keep_shapes=bool(symbols) and precision == "fp32")
    onnx.save(model, draft)
    return notes


def embed(draft: Path, text: str) -> None:
    """Puts metadata into the model's own `metadata_props`."""
    model = onnx.load(draft)
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA_KEY, value=text)
    onnx.save(model, draft)


def read(path: Path) -> str | None:
    """The metadata of a file, None where it has none. Raises EdgeVitError when it is no ONNX model."""
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise EdgeVitError(f"{path}: not an ONNX model, or cut short") from error
    if not model.graph.node:
        raise EdgeVitError(f"{path}: not an ONNX model: it holds no graph")
    return {item.key: item.value for item in model.metadata_props}.get(METADATA_KEY)


def _trace(
    module: nn.Module, signature: Signature, sizes: Sequence[Size], symbols: Mapping[str, Any], batch: int
) -> torch.export.ExportedProgram:
    """`module` as torch.export's graph, with `symbols` in the place of the dimensions of those names."""
    named = Named(module, signature).eval()
    # Batch 1 and equal sides would be taken for constants; 2 and different sides cannot be.
    size = _different_sides(signature, sizes) if len(sizes) > 1 else sizes[0]
    example = zero_inputs(signature, size, batch)
    shapes = {
        spec.name: {axis: symbols[str(d)] for axis, d in enumerate(spec.shape) if d in symbols}
        for spec in signature.inputs
    }
    try:
        program = torch.export.export(
            named,
            (),
            kwargs=example,
            dynamic_shapes={"inputs": shapes} if symbols else None,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    except Exception as error:  # whatever a stranger's module makes torch.export say
        raise untraceable(error) from error
    _check_still_dynamic(program, shapes)
    return program


def _check_still_dynamic(program: torch.export.ExportedProgram, shapes: Mapping[str, Mapping[int, Any]]) -> None:
    """Raises EdgeVitError for a dimension that the module made a number.

    torch.export may narrow its range and say nothing, and the file would run at that size only. `shapes`
    holds the symbols asked for, by input and axis.
    """
    for node, (_, axes) in zip(program.graph.find_nodes(op="placeholder")[-len(shapes) :], shapes.items(), strict=True):
        for axis, symbol in axes.items():
            length = node.meta["val"].shape[axis]
            free = () if isinstance(length, int) else length.node.expr.free_symbols
            ranges = [program.range_constraints[item] for item in free if item in program.range_constraints]
            if isinstance(length, int) or any(found.lower == found.upper for found in ranges):
                raise baked(getattr(symbol, "root", symbol).__name__)


def _symbols(signature: Signature, sizes: Sequence[Size], batch: int | str) -> dict[str, Any]:
    """What stays dynamic, by name."""
    symbols = {dim.name: _symbol(dim) for dim in signature.dims} if len(sizes) > 1 else {}
    if batch == "dynamic" and any("batch" in spec.shape for spec in signature.inputs):
        symbols["batch"] = torch.export.Dim("batch")
    return symbols


def _different_sides(signature: Signature, sizes: Sequence[Size]) -> Size:
    """A size about as large as the largest in which no two symbolic dimensions are equal, so that none is confused.

    Nor is one a few units only: a map of one pixel, or of one patch, would be traced as if it could not grow.
    """
    values: dict[str, int] = {}
    for dim in signature.dims:
        largest = max(size[dim.name] for size in sizes)
        start = max(largest, FEW_UNITS * dim.multiple_of)
        near = sorted((start + dim.multiple_of * step for step in range(-2, 4)), key=lambda n: abs(n - start))
        least = FEW_UNITS * dim.multiple_of
        allowed = [n for n in near if n >= least and (dim.maximum is None or n <= dim.maximum)]
        values[dim.name] = next((n for n in allowed if n not in values.values()), largest)
    return Size(tuple(values.items()))


def _symbol(dim: Dim) -> Any:
    """`dim` for torch.export, which takes a multiple as a product: 32 * height_units."""
    step = dim.multiple_of
    if step == 1:
        return torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum)
    largest = dim.maximum // step if dim.maximum else None
    return step * torch.export.Dim(f"{dim.name}_units", min=max(1, -(-dim.minimum // step)), max=largest)


def _name_dimensions(model: onnx.ModelProto, signature: Signature, symbols: set[str]) -> None:
    """Names dynamic dimensions as the signature does; the exporter calls them s77.

    Intermediate values follow: a runtime takes lengths for equal when their names are.
    """
    graph, names = model.graph, dict[str, str]()
    for values, specs in ((graph.input, signature.inputs), (graph.output, signature.outputs)):
        for value, spec in zip(values, specs, strict=True):
            for dim, entry in zip(value.type.tensor_type.shape.dim, spec.shape, strict=True):
                if entry in symbols:
                    names[dim.dim_param] = dim.dim_param = str(entry)
    for value in graph.value_info:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def _strip(model: onnx.ModelProto, *, keep_shapes: bool) -> None:
    """Drops what only the exporter needs.

    Runtimes infer fixed shapes again, but lose symbolic ones at a Reshape, and only where lengths are known to be
    equal does ONNX Runtime use a buffer twice (4 % of MobileViT's time): those of intermediate values may be kept.
    """
    graph = model.graph
    holders: list[Any] = [graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *model.functions]
    for holder in holders:
        del holder.metadata_props[:]
        holder.doc_string = ""
    weights = {tensor.name for tensor in graph.initializer}
    kept = [info for info in graph.value_info if keep_shapes and info.name not in weights]
    del graph.value_info[:]
    graph.value_info.extend(kept)
