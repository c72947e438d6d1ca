"""TFLite: one file with one signature per size, weights stored once. Runs in LiteRT."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from converters.errors import EdgeVitError
from converters.picture import PictureInput
from converters.signature import Signature, Size
from converters.tflite_file import METADATA_NAME, TFLiteFile, text
from converters.tflite_metadata import describe_picture
from converters.unsupported import refuse_large, unsupported
from converters.wrap import Named, zero_inputs

CONVERTER_PACKAGES = ("litert-torch", "litert-converter")
RUNTIME_PACKAGE = "ai-edge-litert"
# The share of a half-precision file's constants that may still be float32: norms, biases, tables that are added.
FULL_SHARE = 0.1
_WRAPPER = f"{Named.__module__}.{Named.__name__}"


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
    """Writes `draft` with a signature named `Size.entry_point` for each size, the default first; the batch is fixed.

    "fp16" keeps the weights of convolutions, linear layers and embeddings as float16 and computes with float32, as do
    inputs and outputs; so no value leaves a range, and `samples` are not needed. A PictureInput's file carries TFLite
    Metadata with `labels`. Tensors are named after their module; `debug_info` leaves the converter's names, which are
    longer than a small model's weights. int64 inputs and outputs become int32. Raises EdgeVitError naming the
    operation, module and line that cannot be converted.
    """
    refuse_large(module, "tflite")
    content = _convert(module, signature, sizes, 1 if batch == "dynamic" else int(batch))
    if precision == "fp16":
        content = _halved(content)
    file = TFLiteFile.parse(content)
    if precision == "fp16":
        _check_half(file.model)
    if not debug_info:
        _shorten_names(file.model)
    if isinstance(module, PictureInput):
        describe_picture(file, signature, labels, name=draft.stem)
    draft.write_bytes(file.to_bytes())
    return []


def embed(draft: Path, text: str) -> None:
    """Puts metadata into `Model.metadata` under EDGEVIT_METADATA, in a buffer of its own, uncompressed UTF-8.

    What else the file holds stays: other metadata, and the files appended to it.
    """
    file = TFLiteFile.parse(draft.read_bytes(), name=draft)
    file.set_metadata(METADATA_NAME, text.encode())
    draft.write_bytes(file.to_bytes())


def read(path: Path) -> str | None:
    """The metadata of a file, None where it has none. Raises EdgeVitError when it is no whole TFLite model."""
    file = TFLiteFile.parse(path.read_bytes(), name=path)
    try:
        data = file.metadata(METADATA_NAME)
        return None if data is None else data.decode()
    except (IndexError, TypeError, ValueError) as error:
        raise EdgeVitError(f"{path}: its metadata is damaged") from error


def _convert(module: nn.Module, signature: Signature, sizes: Sequence[Size], batch: int) -> bytes:
    import litert_torch

    named = Named(module, signature, as_dict=True).eval()
    converter: Any = litert_torch
    for size in sizes:
        example = zero_inputs(signature, size, batch)
        converter = converter.signature(size.entry_point, named, sample_kwargs=example)
    try:
        return converter.convert().model_content()  # its own export() ends the process when the disk is full
    except Exception as error:  # the converter raises whatever it likes
        if (refusal := unsupported(error, "tflite")) is not None:
            raise refusal from error
        raise


def _halved(content: bytes) -> bytes:
    """Weights as float16, each behind a DEQUANTIZE that runtimes fold away when they load the file."""
    from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe_manager

    recipes = recipe_manager.RecipeManager()
    recipes.add_quantization_config(
        regex=".*",
        operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
        op_config=qtyping.OpQuantizationConfig(
            weight_tensor_config=qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT),
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        ),
        algorithm_key=algorithm_manager.AlgorithmName.FLOAT_CASTING,
    )
    with np.errstate(over="ignore"):  # what overflows is refused below
        return bytes(
            quantizer.Quantizer(bytearray(content), recipes.get_quantization_recipe()).quantize().quantized_model
        )


def _check_half(model: schema.ModelT) -> None:
    """Raises EdgeVitError when the weights are not float16, or one of them did not fit into it."""
    sizes: dict[int, dict[int, int]] = {schema.TensorType.FLOAT16: {}, schema.TensorType.FLOAT32: {}}
    for subgraph in model.subgraphs:
        for tensor in subgraph.tensors:
            data = model.buffers[tensor.buffer].data
            if tensor.type not in sizes or data is None:
                continue
            sizes[tensor.type][tensor.buffer] = int(np.prod(tensor.shape))
            if tensor.type == schema.TensorType.FLOAT16 and not np.isfinite(np.asarray(data).view(np.float16)).all():
                raise EdgeVitError(f"fp16: weights of '{text(tensor.name)}' are beyond 65,504; export fp32 instead")
    half, full = (sum(found.values()) for found in sizes.values())
    if full > FULL_SHARE * (half + full):
        raise EdgeVitError(
            f"fp16: {full / (half + full):.0%} of this model's weights stay float32, since only those of convolutions, "
            "linear layers and embeddings can be float16; export fp32 instead"
        )


def _shorten_names(model: schema.ModelT) -> None:
    """`stage5.1.attention;3` instead of the class and name of every module around it, often for several operations.

    Tensors that are inputs or outputs keep the names by which signatures know them.
    """
    ports = [{*subgraph.inputs, *subgraph.outputs} for subgraph in model.subgraphs]
    taken = {text(subgraph.tensors[i].name) for subgraph, own in zip(model.subgraphs, ports, strict=True) for i in own}
    count: Counter[str] = Counter()
    for subgraph, own in zip(model.subgraphs, ports, strict=True):
        for number, tensor in enumerate(subgraph.tensors):
            if number in own:
                continue
            short = name = _short(text(tensor.name))
            while name in taken:  # quantisers tell a model's tensors apart by their names
                count[short] += 1
                name = f"{short};{count[short]}"
            taken.add(name)
            tensor.name = name


def _short(name: str) -> str:
    """`package.Class_stage/package.Class_1;…;7` → `stage.1`: the innermost module of the first operation."""
    first = name.partition(";")[0]
    if not first.startswith(_WRAPPER):  # a constant of the converter's own
        return name
    parts = [re.sub(r"^(?:\w+\.)+_?[A-Za-z0-9]+(?:_|$)", "", part) for part in first.split("/")]
    path = ".".join(part for part in parts if part and part != "module") or "model"
    return path
