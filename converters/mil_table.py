"""The table of the Core ML evaluator's ops, and how one is put into it. `converters.mil_ops` fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]  # tensors → a tensor, or a sequence of tensors


@dataclass(frozen=True)
class Op:
    """One op of the table.

    `inputs` names the tensor arguments in the order of the call; "name?" may be missing, "*name" is a list.
    `make` takes the op's other arguments (strides, axes, modes, …) by MIL's names, refuses with NotImplementedError
    what it does not know, and gives the function that is called with the tensors at every run.
    `selects` says that every output element is an input element or a constant of the program, so that rounding the
    output to the inputs' type once more would change nothing.
    """

    inputs: tuple[str, ...]
    make: Callable[..., Function]
    selects: bool = False


OPS: dict[str, Op] = {}


def op(*inputs: str, selects: bool = False) -> Callable[[Callable[..., Function]], Callable[..., Function]]:
    """Decorates the `make` of the op of that name; a trailing underscore keeps a name off Python's own."""

    def add(make: Callable[..., Function]) -> Callable[..., Function]:
        OPS[make.__name__.rstrip("_")] = Op(inputs, make, selects)
        return make

    return add


def plain(table: dict[str, Function], *inputs: str, selects: bool = False) -> None:
    """Puts functions that take tensors alone into the table."""
    for name, function in table.items():
        OPS[name] = Op(inputs, lambda function=function: function, selects)
