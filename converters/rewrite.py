"""Rewrites of a module that change how fast its exported file runs, and not what it computes. See docs/speed.md."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from converters.equivalence import same_outputs
from converters.errors import EdgeVitError
from converters.rewrite_attention import split_attentions
from converters.rewrite_norm import fold_batch_norms, spell_out_layer_norms

Example = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rewrite:
    """`apply(module, form, example)` returns a rewritten module, which may be its argument, or None to leave it."""

    apply: Callable[[nn.Module, str, Example], nn.Module | None]
    pays: frozenset[str]  # the formats in which the benchmark found files faster or smaller for it


def prepare(module: nn.Module, form: str, example: Example, *, rewrites: Sequence[str] | None = None) -> nn.Module:
    """A copy of `module` (eval mode) as it is best converted to `form` ("onnx", "tflite" or "coreml").

    `example` holds forward's arguments, batch 1. `rewrites` names those of `REWRITES` to try, in the table's order
    whatever theirs is; None tries all that pay in that format. One that does not fit the module, or would change an
    output on `example` by more than 1e-5 of its standard deviation, is left out. `module` itself is not changed.

    Raises EdgeVitError for a name that is not in `REWRITES`.
    """
    if unknown := [name for name in rewrites or () if name not in REWRITES]:
        raise EdgeVitError(f"unknown rewrite '{unknown[0]}'; there are {', '.join(REWRITES)}")
    original = copy.deepcopy(module).eval()
    prepared = original
    for name, rewrite in REWRITES.items():
        wanted = form in rewrite.pays if rewrites is None else name in rewrites
        if not wanted:
            continue
        try:
            candidate = rewrite.apply(copy.deepcopy(prepared), form, example)
            if candidate is not None and same_outputs(original, candidate, example):
                prepared = candidate
        except Exception:  # whatever a stranger's module says to being traced, copied or rewritten: then it stays
            continue
    return prepared


def _own_form(module: nn.Module, form: str, _example: Example) -> nn.Module | None:
    """What a module's own method `export_form(form)` returns, if it has one."""
    own = getattr(module, "export_form", None)
    return own(form).eval() if callable(own) else None


REWRITES = {
    "export_form": Rewrite(_own_form, frozenset({"onnx", "tflite", "coreml"})),
    "fold_batch_norm": Rewrite(fold_batch_norms, frozenset({"onnx", "tflite", "coreml"})),
    "split_qkv": Rewrite(split_attentions, frozenset({"onnx", "tflite"})),
    "spell_out_layer_norm": Rewrite(spell_out_layer_norms, frozenset({"tflite"})),
}
