"""One size of a module as a Core ML program: traced once, then written in the precision that is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from converters.artifact import Preprocessing
from converters.coreml_decompositions import decompositions, torchs_own
from converters.coreml_folding import fold_constants
from converters.errors import EdgeVitError, first_line
from converters.picture import PictureInput
from converters.quiet import quiet
from converters.signature import Signature, Size
from converters.wrap import Named, zero_inputs

with quiet():  # it complains about this torch, and on Linux about the missing framework
    import coremltools as ct

TARGETS = {"ios16": "iOS16", "ios17": "iOS17", "ios18": "iOS18"}
CLASS_LABEL = "classLabel"
DEPTH = 4  # how often what a decomposition left may be decomposed in turn
_SCORES = f"{CLASS_LABEL}_probs"  # coremltools' name for what a classifier gives beside the label


@dataclass(frozen=True)
class Traced:
    """A module's graph at one size. `picture` is the preprocessing that the file does; `labels` make a classifier."""

    program: torch.export.ExportedProgram
    signature: Signature
    size: Size
    batch: int
    picture: Preprocessing | None
    labels: tuple[str, ...]


def trace(module: nn.Module, signature: Signature, size: Size, batch: int, labels: Sequence[str] = ()) -> Traced:
    """Raises EdgeVitError for a module that cannot be traced at `size`."""
    picture = module.preprocessing if isinstance(module, PictureInput) else None
    example = zero_inputs(signature, size, batch)
    if isinstance(module, PictureInput):
        example = {name: image.permute(0, 3, 1, 2).float().contiguous() for name, image in example.items()}
        module = _Normalised(module)
    program = torch.export.export(_Distinct(module, signature).eval(), (), kwargs=example, strict=False)
    program = program.run_decompositions(decompositions())
    for _ in range(DEPTH):
        if not (table := torchs_own(program)):
            break
        program = program.run_decompositions(table)
    fold_constants(program)
    one_output = len(signature.outputs) == 1 and signature.outputs[0].meaning == "probabilities"
    return Traced(program, signature, size, batch, picture, tuple(labels) if picture and one_output else ())


def write(traced: Traced, path: Path, *, target: str, half: bool, kept: Collection[str] = ()) -> None:
    """Writes a package. With `half` the arithmetic is fp16 except in the ops whose outputs are named in `kept`.

    A softmax that a program ends with stays in fp32 too: small probabilities are lost in fp16. Inputs and outputs are
    float32 and int32. Raises EdgeVitError for an op that Core ML has no conversion for.
    """
    precision = ct.precision.FLOAT32
    if half:
        precision = ct.transform.FP16ComputePrecision(
            op_selector=_selector(kept, bool(traced.labels or traced.picture))
        )
    options: dict[str, Any] = {"outputs": _outputs(traced.signature)}
    if traced.labels:  # a classifier's outputs are coremltools' own; they are renamed below
        options = {"classifier_config": ct.ClassifierConfig(list(traced.labels), predicted_feature_name=CLASS_LABEL)}
    if traced.picture:
        options["inputs"] = [_image_type(traced, traced.picture)]
    try:
        model = ct.convert(
            traced.program,
            convert_to="mlprogram",
            minimum_deployment_target=getattr(ct.target, TARGETS[target]),
            compute_precision=precision,
            skip_model_load=True,
            **options,
        )
    except Exception as error:  # whatever a conversion of a single op raises
        if unsupported := _unsupported(error, traced.program):
            raise unsupported from error
        raise
    if traced.labels:
        spec = model.get_spec()
        ct.utils.rename_feature(spec, _SCORES, traced.signature.outputs[0].name)
        model = ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True)
    model.save(str(path))


def _outputs(signature: Signature) -> list[Any]:
    kinds = (np.float32 if spec.dtype.startswith("float") else np.int32 for spec in signature.outputs)
    return [ct.TensorType(name=spec.name, dtype=kind) for spec, kind in zip(signature.outputs, kinds, strict=True)]


def _image_type(traced: Traced, picture: Preprocessing) -> Any:
    """Core ML's own preprocessing, v × scale + bias: exact where the channels share one std."""
    spec = traced.signature.inputs[0]
    batch, height, width, channels = spec.resolve(traced.size, traced.batch)
    std = picture.std[0] if _one_std(picture) else 1.0
    return ct.ImageType(
        name=spec.name,
        shape=(batch, channels, height, width),
        color_layout=picture.channel_order,
        scale=picture.scale / std,
        bias=[-mean / std for mean in picture.mean],
    )


def _one_std(picture: Preprocessing) -> bool:
    return len(set(picture.std)) == 1


class _Normalised(nn.Module):
    """What is left of a PictureInput where Core ML's image type does the scaling: (N, 3, H, W) → its outputs.

    The image type has one scale for all channels. Where their stds differ, the rest of the division is done here, by
    channel: an averaged one would cost 20 dB.
    """

    inverse_std: Tensor

    def __init__(self, picture: PictureInput) -> None:
        super().__init__()
        self.picture = picture
        preprocessing = picture.preprocessing
        inverse = [1.0] * 3 if _one_std(preprocessing) else [1 / std for std in preprocessing.std]
        self.register_buffer("inverse_std", torch.tensor(inverse).reshape(3, 1, 1), persistent=False)
        self.divides = not _one_std(preprocessing)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        x = image * self.inverse_std if self.divides else image
        return self.picture.finished(self.picture.module(x))


class _Distinct(nn.Module):
    """`Named`, whose every output is a value of its own: neither an input nor another output.

    Core ML names values, so that one value under two names would get one of them.
    """

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.named = Named(module, signature)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        taken = [*inputs.values()]
        outputs = []
        for output in self.named(**inputs):
            if any(output is other for other in taken):
                output = output.reshape(1, *output.shape).squeeze(0)
            taken.append(output)
            outputs.append(output)
        return tuple(outputs)


def _selector(kept: Collection[str], keep_last_softmax: bool) -> Callable[[Any], bool]:
    """Tells coremltools which ops become fp16."""

    def to_half(op: Any) -> bool:
        if any(output.name in kept for output in op.outputs):
            return False
        return not (keep_last_softmax and op.op_type == "softmax" and _ends(op))

    return to_half


def _ends(op: Any) -> bool:
    """Whether an op makes an output of the program, as it is or cast."""
    value = op.outputs[0]
    return value in op.enclosing_block.outputs or any(
        child.op_type == "cast" and _ends(child) for child in value.child_ops
    )


def _unsupported(error: Exception, program: torch.export.ExportedProgram) -> EdgeVitError | None:
    """Names the op, the module and the source line behind an exception from the conversion of one op."""
    name = next(iter(re.findall(r"^Unsupported fx node (\S+),", str(error))), None)
    trace_ = error.__traceback__
    while trace_:
        if trace_.tb_frame.f_code.co_name == "convert_nodes" and "node" in trace_.tb_frame.f_locals:
            name = trace_.tb_frame.f_locals["node"].name
        trace_ = trace_.tb_next
    found = next((item for item in program.graph.nodes if item.name == name), None)
    if found is None:
        return None
    missing = "not implemented" in str(error) or "Unsupported fx node" in str(error)
    why = "coremltools has no conversion for it" if missing else f"coremltools cannot convert it ({first_line(error)})"
    return EdgeVitError(f"op {found.target}{called_from(found)}: {why}; replace it in the model")


def called_from(node: torch.fx.Node) -> str:
    """` in module 'features.3', file.py:41`, as far as a traced node knows the module and line that called it."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = re.sub(r"^(named|module|picture)\.?", "", stack[-1]) if stack else ""
    while path != (path := re.sub(r"^(named|module|picture)(\.|$)", "", path)):
        pass
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    words = [f"module '{path}'"] if path else []
    if lines:
        file, number = lines[-1]
        words.append(f"{Path(file).name}:{number}")
    return f" in {', '.join(words)}" if words else ""
