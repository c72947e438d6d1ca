"""Floating-point operations of one forward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(module: nn.Module, example: tuple[torch.Tensor, ...]) -> int:
    """FLOPs of convolutions and matrix products of `module(*example)`; a multiply-add counts as two.

    Attention is counted through its plain matrix products: the counter does not know the fused CPU kernel, and would
    count it as nothing.
    """
    counter = FlopCounterMode(display=False)
    # It would follow gradients through a parameter that is handed to a submodule, even where none are computed.
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            module(*example)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops())


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
