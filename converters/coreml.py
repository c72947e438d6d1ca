"""Core ML: an ML program in a `.mlpackage`, one per size, or one with a function per size (iOS 18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from converters.artifact import METADATA_KEY
from converters.errors import EdgeVitError
from converters.quiet import quiet
from converters.signature import Signature, Size
from converters.wrap import Named, zero_inputs

with quiet():  # it complains about this torch, and on Linux about the missing framework
    import coremltools as ct
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError

TARGETS = {"ios16": "iOS16", "ios17": "iOS17", "ios18": "iOS18"}
CONVERTER_PACKAGES = ("coremltools",)
RUNTIME_PACKAGE = "coremltools"
MAIN = "main"  # the function of a package that has one


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
    arithmetic is float16; inputs and outputs stay float32.
    """
    count = 1 if batch == "dynamic" else int(batch)
    target = target or "ios16"
    if len(sizes) == 1:
        _convert_one(module, signature, sizes[0], draft, precision, count, target)
        return []
    if target != "ios18":
        raise EdgeVitError(f"coreml: several sizes in one package need target ios18, not {target}")
    descriptor = ct.utils.MultiFunctionDescriptor()
    for size in sizes:
        part = draft.with_name(f"{size.entry_point}.mlpackage")
        _convert_one(module, signature, size, part, precision, count, target)
        descriptor.add_function(str(part), src_function_name=MAIN, target_function_name=size.entry_point)
    descriptor.default_function_name = sizes[0].entry_point
    ct.utils.save_multifunction(descriptor, str(draft))
    return []


def embed(draft: Path, text: str) -> None:
    """Puts metadata into the specification's user-defined metadata (after functions were combined: that drops it)."""
    file = _specification_file(draft)
    spec = _parse(file, draft)
    spec.description.metadata.userDefined[METADATA_KEY] = text
    file.write_bytes(spec.SerializeToString())


def read(path: Path) -> str | None:
    """The metadata of a package, None where it has none. Raises EdgeVitError when it is no Core ML package."""
    return dict(_parse(_specification_file(path), path).description.metadata.userDefined).get(METADATA_KEY)


def describe(path: Path) -> dict[str, tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]]:
    """For each function, shapes of its inputs and of its outputs by name."""
    description = _parse(_specification_file(path), path).description
    functions = {item.name: item for item in description.functions} or {MAIN: description}
    return {name: (_shapes(item.input), _shapes(item.output)) for name, item in functions.items()}


def _convert_one(
    module: nn.Module, signature: Signature, size: Size, path: Path, precision: str, batch: int, target: str
) -> None:
    named = Named(module, signature).eval()
    example = zero_inputs(signature, size, batch)
    program = torch.export.export(named, (), kwargs=example, strict=False).run_decompositions({})
    outputs = [
        ct.TensorType(name=spec.name, dtype=np.float32 if spec.dtype.startswith("float") else np.int32)
        for spec in signature.outputs
    ]
    model = ct.convert(
        program,
        outputs=outputs,
        convert_to="mlprogram",
        minimum_deployment_target=getattr(ct.target, TARGETS[target]),
        compute_precision=ct.precision.FLOAT16 if precision == "fp16" else ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(path))


def _specification_file(path: Path) -> Path:
    files = sorted(path.glob("Data/*/*.mlmodel")) if path.is_dir() else []
    if len(files) != 1:
        raise EdgeVitError(f"{path}: not a Core ML package (a folder with Manifest.json and one .mlmodel inside)")
    return files[0]


def _parse(file: Path, path: Path) -> Any:
    spec = Model_pb2.Model()
    try:
        spec.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise EdgeVitError(f"{path}: a damaged Core ML package: {file.name} cannot be read") from error
    if spec.WhichOneof("Type") != "mlProgram":
        raise EdgeVitError(f"{path}: holds no ML program; other kinds of Core ML models are not read here")
    return spec


def _shapes(features: Any) -> dict[str, tuple[int, ...]]:
    return {item.name: tuple(item.type.multiArrayType.shape) for item in features}
