"""ONNX: one file for every size, through torch's exporter. Runs in ONNX Runtime."""

from __future__ import annotations

import copy
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
from converters.wrap import Named, zero_inputs

OPSET = 18
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

    `batch` is a number or "dynamic". The node metadata that torch's exporter adds (stack traces with paths of this
    machine, a fifth of a small model's file) is taken out.
    """
    dynamic_dims = {dim.name: dim for dim in signature.dims} if len(sizes) > 1 else {}
    half = precision == "fp16"
    named = Named(copy.deepcopy(module).half() if half else module, signature, half=half).eval()
    # Batch 1 and equal sides would be taken for constants; 2 and different sides cannot be.
    size = _different_sides(signature, sizes) if dynamic_dims else sizes[0]
    example = zero_inputs(signature, size, 2 if batch == "dynamic" else int(batch))
    symbols = {name: _symbol(dim) for name, dim in dynamic_dims.items()}
    if batch == "dynamic":
        symbols["batch"] = torch.export.Dim("batch")
    shapes = {
        spec.name: {axis: symbols[d] for axis, d in enumerate(spec.shape) if d in symbols} for spec in signature.inputs
    }
    torch.onnx.export(
        named,
        kwargs=example,
        f=str(draft),
        dynamo=True,
        opset_version=OPSET,
        external_data=False,
        input_names=[spec.name for spec in signature.inputs],
        output_names=[spec.name for spec in signature.outputs],
        dynamic_shapes={"inputs": shapes} if symbols else None,
        verbose=False,
    )
    _strip(draft, signature, set(symbols))
    return []


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


def _different_sides(signature: Signature, sizes: Sequence[Size]) -> Size:
    """A size about as large as the largest in which no two symbolic dimensions are equal, so that none is confused.

    Nor is one a single unit: a map of one pixel would be traced as if it could not grow.
    """
    values: dict[str, int] = {}
    for dim in signature.dims:
        largest = max(size[dim.name] for size in sizes)
        start = max(largest, 2 * dim.multiple_of)
        near = [start + dim.multiple_of * step for step in (0, -1, 1, -2, 2, 3)]
        allowed = [n for n in near if n >= 2 * dim.multiple_of and (dim.maximum is None or n <= dim.maximum)]
        values[dim.name] = next((n for n in allowed if n not in values.values()), largest)
    return Size(tuple(values.items()))


def _symbol(dim: Dim) -> Any:
    """`dim` for torch.export, which takes a multiple as a product: 32 * height_units."""
    step = dim.multiple_of
    if step == 1:
        return torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum)
    largest = dim.maximum // step if dim.maximum else None
    return step * torch.export.Dim(f"{dim.name}_units", min=max(1, -(-dim.minimum // step)), max=largest)


def _strip(draft: Path, signature: Signature, symbols: set[str]) -> None:
    """Drops what only the exporter needs, and names dynamic dimensions as the signature does."""
    model = onnx.load(draft)
    graph = model.graph
    holders: list[Any] = [graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *model.functions]
    for holder in holders:
        del holder.metadata_props[:]
    del graph.value_info[:]  # runtimes infer these shapes again
    for values, specs in ((graph.input, signature.inputs), (graph.output, signature.outputs)):
        for value, spec in zip(values, specs, strict=True):
            for dim, entry in zip(value.type.tensor_type.shape.dim, spec.shape, strict=True):
                if entry in symbols:
                    dim.dim_param = entry
    onnx.save(model, draft)
