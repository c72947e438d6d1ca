"""What there is to choose from: `models()` describes every registered model without allocating its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from converters.flops import count_flops, count_parameters
from edgevit.models.registry import create_model, find_model, list_models


@dataclass(frozen=True)
class ModelSummary:
    name: str
    parameters: int  # with 1,000 classes
    flops_256: int  # of one 256 × 256 picture; a multiply-add counts as two
    published_top1: float | None  # percent, ImageNet-1k
    paper: str


def models() -> list[ModelSummary]:
    """One summary per registered model, in the registry's order."""
    return [_summary(name) for name in list_models()]


def _summary(name: str) -> ModelSummary:
    entry = find_model(name)
    with torch.device("meta"):
        module = create_model(name).eval()
        flops = count_flops(module, (torch.empty(1, 3, 256, 256),))
    return ModelSummary(name, count_parameters(module), flops, entry.top1, entry.paper)
