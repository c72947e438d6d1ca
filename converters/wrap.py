"""A module behind its signature: inputs by name, outputs by name, whatever forward returns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from converters.errors import EdgeVitError
from converters.signature import Signature, Size


class Named(nn.Module):
    """forward(**inputs) → outputs as a tuple in the signature's order, or as a dict with `as_dict`.

    With `half`, weights and arithmetic are float16 while floating-point inputs and outputs stay float32.
    """

    def __init__(self, module: nn.Module, signature: Signature, *, as_dict: bool = False, half: bool = False) -> None:
        super().__init__()
        self.module = module
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)
        self.as_dict = as_dict
        self.half_inside = half

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        arguments = [inputs[name] for name in self.inputs]
        if self.half_inside:
            arguments = [x.half() if x.is_floating_point() else x for x in arguments]
        outputs = named_outputs(self.module(*arguments), self.outputs)
        if self.half_inside:
            outputs = {name: y.float() if y.is_floating_point() else y for name, y in outputs.items()}
        return outputs if self.as_dict else tuple(outputs[name] for name in self.outputs)


def named_outputs(result: object, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What a module returned (a tensor, a sequence or a dict) by the signature's names."""
    if isinstance(result, torch.Tensor):
        result = (result,)
    if isinstance(result, Mapping):
        if missing := [name for name in names if name not in result]:
            raise EdgeVitError(f"the module returns no output '{missing[0]}'; it returns {', '.join(map(str, result))}")
        return {name: result[name] for name in names}
    if not isinstance(result, tuple | list) or len(result) != len(names):
        raise EdgeVitError(f"the module does not return the signature's outputs: {', '.join(names)}")
    return dict(zip(names, result, strict=True))


def zero_inputs(signature: Signature, size: Size, batch: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of the right shapes and dtypes, for tracing only."""
    return {
        spec.name: torch.zeros(spec.resolve(size, batch), dtype=getattr(torch, spec.dtype)) for spec in signature.inputs
    }


def run_module(module: nn.Module, signature: Signature, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The module's own outputs for arrays (N, …): what every artifact is compared with."""
    arguments = [torch.from_numpy(np.ascontiguousarray(inputs[spec.name])) for spec in signature.inputs]
    with torch.inference_mode():
        outputs = named_outputs(module(*arguments), tuple(spec.name for spec in signature.outputs))
    return {name: tensor.numpy() for name, tensor in outputs.items()}
