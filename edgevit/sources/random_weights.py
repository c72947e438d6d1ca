"""Random weights that are worth comparing and timing: no dead branch, and every signal of ordinary size.

With a library's own initialisation many networks give nothing to compare: layer scales of 1e-6 and zero gammas switch
whole blocks off, running statistics are those of no data, and without normalisation a signal fades out on its way. Any
wrong file would agree with such a model, and a converter may delete what is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from converters.errors import EdgeVitError, first_line

TINY = 1e-3  # a parameter no larger than this does nothing
SEED = 0


def scale_weights(module: nn.Module, inputs: tuple[Tensor, ...], seed: int = SEED) -> None:
    """Replaces the weights in place, the same way every time; `inputs` (N, …) are forward's arguments, N at least 4.

    Convolutions and linear layers get normal weights, then the scale at which their outputs for `inputs` have a
    standard deviation of 1. Norms get weights around 1; parameters that are zero or close to it (layer scales, zero
    gammas, position tables, biases) small random values. BatchNorm gets the statistics of `inputs`, and biases
    around 1: most values then lie where the activation behind it passes them on. With biases around 0 a deep network of
    random weights is chaotic, as no trained one is: rounding to fp16 between the layers of a MobileNetV2 grew to 12 %
    of its logits' standard deviation, and to 0.5 % with these. The module is left in eval mode and the global
    generator as it was. Raises EdgeVitError when the module cannot take `inputs`.
    """
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in module.modules():
            _draw(layer, generator)
        momenta = {layer: layer.momentum for layer in module.modules() if isinstance(layer, _BatchNorm)}
        hooks = [layer.register_forward_hook(_fit(set())) for layer in module.modules() if _is_linear(layer)]
        for norm in momenta:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average
            norm.train()
        try:
            module(*inputs)
        except Exception as error:  # a stranger's module raises whatever it likes
            raise EdgeVitError(f"the module fails on the example inputs: {first_line(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        for norm, momentum in momenta.items():
            norm.momentum = momentum
            norm.eval()


def _draw(layer: nn.Module, generator: torch.Generator) -> None:
    """New values for the parameters that `layer` itself owns."""
    linear, norm = _is_linear(layer), "Norm" in type(layer).__name__
    for name, parameter in layer.named_parameters(recurse=False):
        if not parameter.is_floating_point():
            continue
        if linear and name == "weight":
            nn.init.kaiming_normal_(parameter, nonlinearity="linear", generator=generator)
        elif (norm and name == "weight") or (isinstance(layer, _BatchNorm) and name == "bias"):
            parameter.uniform_(0.8, 1.2, generator=generator)
        elif name.endswith("bias") and parameter.ndim == 1:
            parameter.uniform_(-0.2, 0.2, generator=generator)
        elif parameter.abs().max() <= TINY:
            _revive(parameter, generator)


def _revive(parameter: Tensor, generator: torch.Generator) -> None:
    """One value per channel is a scale, so it is kept away from zero; anything else is a table, and stays small."""
    if max(parameter.shape, default=1) == parameter.numel():
        parameter.uniform_(0.2, 0.6, generator=generator)
    else:
        parameter.normal_(0, 0.1, generator=generator)


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | _ConvNd)


def _fit(seen: set[int]) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
    """A hook that scales a layer's weights, the first time it runs, so that its outputs get a deviation of 1."""

    def hook(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        if id(layer) in seen:
            return None
        seen.add(id(layer))
        bias = getattr(layer, "bias", None)
        shift = 0.0 if bias is None else bias.view(-1, *[1] * (output.ndim - 2)) if isinstance(layer, _ConvNd) else bias
        signal = output - shift
        deviation = float(signal.std())
        if deviation < 1e-8:
            return None
        layer.weight.div_(deviation)  # type: ignore[operator]
        return signal / deviation + shift

    return hook
