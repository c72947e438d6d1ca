"""Whether two modules compute the same, and the exchange of submodules for others that do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from converters.wrap import flat_outputs

TOLERANCE = 1e-5  # of the output's standard deviation


def same_outputs(one: nn.Module, two: nn.Module, example: tuple[torch.Tensor, ...]) -> bool:
    """Whether each output on `example` differs by at most 1e-5 of its standard deviation.

    What float32 rounds away may be more than that, so a difference counts only when it is there in float64 too.
    """
    with torch.no_grad():
        if _close(one(*example), two(*example)):
            return True
        try:
            wide = tuple(x.double() if x.is_floating_point() else x for x in example)
            return _close(copy.deepcopy(one).double()(*wide), copy.deepcopy(two).double()(*wide))
        except RuntimeError:  # a forward that names float32 itself
            return False


def exchange(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    build: Callable[[nn.Module, tuple[Any, ...]], nn.Module | None],
) -> bool:
    """Puts `build(submodule, its arguments)` in place of each submodule that it is offered for, and returns the same.

    `build` gives None where it has nothing to offer. Each offer is compared with the submodule on what that is called
    with when `module` runs on `example`, so a class that only looks alike stays. `module` is
    changed in place; returns whether it was.
    """
    changed = False
    for name, (arguments, keywords, output) in _calls(module, example).items():
        old = module.get_submodule(name)
        with torch.no_grad():
            new = build(old, arguments)
            if new is None:
                continue
            try:
                same = _close(output, new(*arguments, **keywords))
            except (RuntimeError, TypeError, ValueError):  # it takes other arguments or shapes than it seemed to
                same = False
        if same:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, new)
            changed = True
    return changed


def _calls(module: nn.Module, example: tuple[torch.Tensor, ...]) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Positional and keyword arguments and the output of each submodule's first call."""
    calls: dict[str, tuple[Any, dict[str, Any], Any]] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
            calls.setdefault(name, (arguments, keywords, output))

        return record

    handles = [
        child.register_forward_hook(recorder(name), with_kwargs=True) for name, child in module.named_modules() if name
    ]
    try:
        with torch.no_grad():
            module(*example)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _close(one: object, two: object) -> bool:
    """Whether both hold the same tensors. What holds none, such as an object of a class of its own, is not compared."""
    first, second = list(flat_outputs(one).values()), list(flat_outputs(two).values())
    return bool(first) and all(
        a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * max(float(a.std()), 1e-12))
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )
