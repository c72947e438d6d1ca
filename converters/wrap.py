"""A module behind its signature: inputs by name, outputs by name, whatever forward returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    """What a module returned, nested or not, by the signature's names: those of a dict, else by position."""
    outputs = flat_outputs(result)
    if set(names) <= set(outputs):
        return {name: outputs[name] for name in names}
    if isinstance(result, Mapping):
        missing = next(name for name in names if name not in outputs)
        raise EdgeVitError(f"the module returns no output '{missing}'; it returns {', '.join(outputs)}")
    if len(outputs) != len(names):
        raise EdgeVitError(f"the module does not return the signature's outputs: {', '.join(names)}")
    return dict(zip(names, outputs.values(), strict=True))


def flat_outputs(result: object) -> dict[str, torch.Tensor]:
    """Every tensor of what a module returned, however nested, by name, in order.

    A tensor alone is `output`; items of a sequence are numbered, `output_0`, and keys of a dict are names as they are;
    further down both are joined with `_`, such as `features_1`. What is no tensor, such as None, is left out.
    """
    if isinstance(result, torch.Tensor):
        return {"output": result}
    return dict(_leaves(result, "" if isinstance(result, Mapping) else "output"))


def _leaves(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | tuple | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}_{key}" if path else str(key))


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
