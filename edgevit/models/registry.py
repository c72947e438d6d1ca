"""Models by name: `create_model("mobilevit_s")`. A model is added by a line in `MODELS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from converters.errors import EdgeVitError
from edgevit.models import mobilevit


@dataclass(frozen=True)
class Entry:
    """How a registered model is built (`build(num_classes=…, **kwargs)`) and what its paper reports."""

    build: Callable[..., nn.Module]
    paper: str
    top1: float | None  # ImageNet-1k validation accuracy in percent, published, at 256 × 256


MODELS = {
    "mobilevit_xxs": Entry(partial(mobilevit.MobileViT, mobilevit.XXS), "arXiv 2110.02178", 69.0),
    "mobilevit_xs": Entry(partial(mobilevit.MobileViT, mobilevit.XS), "arXiv 2110.02178", 74.8),
    "mobilevit_s": Entry(partial(mobilevit.MobileViT, mobilevit.S), "arXiv 2110.02178", 78.4),
}


def list_models() -> list[str]:
    """Names that `create_model` knows, smallest first within a family."""
    return list(MODELS)


def create_model(name: str, num_classes: int = 1000, **kwargs: Any) -> nn.Module:
    """Builds a model with fresh weights, in training mode; `kwargs` go to its class, such as `dropout=0.0`.

    Raises EdgeVitError for a name that is not registered, naming the nearest ones, and for fewer than one class.
    """
    entry = find_model(name)
    if num_classes < 1:
        raise EdgeVitError(f"{name}: num_classes must be at least 1, not {num_classes}")
    return entry.build(num_classes=num_classes, **kwargs)


def find_model(name: str) -> Entry:
    """The registered entry. Raises EdgeVitError for an unknown name, naming the nearest ones."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(MODELS)}"
        raise EdgeVitError(f"unknown model '{name}'; {advice}")
    return MODELS[name]
