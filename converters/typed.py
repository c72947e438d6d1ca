"""JSON of an unknown origin as the dataclasses that it should be: every value is of its field's type, or ValueError."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 2**63  # whole numbers beyond it are no count of anything

Readers = Mapping[type, Callable[[Any], Any]]


def typed(kind: Any, value: Any, readers: Readers | None = None, where: str = "") -> Any:
    """`value`, as `json.loads` gives it, as `kind`: a plain type, tuple[X, ...], dict, union, Literal or dataclass.

    `readers` read what JSON has no form of. Fields with a default may be missing. Raises ValueError, with the place.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if readers and kind in readers:
        return readers[kind](value)
    if is_dataclass(kind):
        return _dataclass(kind, value, readers, where)
    if origin in (Union, types.UnionType):
        return _union(parts, value, readers, where)
    if origin is tuple and isinstance(value, list):
        return tuple(typed(parts[0], item, readers, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: typed(parts[1], item, readers, where) for name, item in value.items()}
    if origin is Literal and isinstance(value, str) and value in parts:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and type(value) is int and abs(value) < LARGEST:
        return value
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"{where or 'it'} is {repr(value)[:60]}")


def _dataclass(kind: Any, value: Any, readers: Readers | None, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is {repr(value)[:60]}")
    hints, prefix = get_type_hints(kind), f"{where}." if where else ""
    for name in value:
        if name not in hints:
            raise ValueError(f"{prefix}{repr(name)[1:-1][:60]} is unknown")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**{name: typed(hints[name], item, readers, prefix + name) for name, item in value.items()})


def _union(parts: tuple[Any, ...], value: Any, readers: Readers | None, where: str) -> Any:
    if value is None and type(None) in parts:
        return None
    *others, last = (part for part in parts if part is not type(None))
    for part in others:
        try:
            return typed(part, value, readers, where)
        except ValueError:
            continue
    return typed(last, value, readers, where)
