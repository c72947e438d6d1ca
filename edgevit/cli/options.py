"""Option types that several commands share; they mean the same thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.errors import EdgeVitError
from converters.signature import Size


class SizesType(click.ParamType):
    """`64`, `192x320` or a list with commas → tuple of Size."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Size, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return Size.parse_list(value)
        except EdgeVitError as error:
            self.fail(str(error), param, ctx)


class ChoicesType(click.ParamType):
    """Names with commas, each one of `choices` → tuple of str."""

    name = "names"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        for name in names:
            if name not in self.choices:
                self.fail(f"'{name}' is not one of {', '.join(self.choices)}", param, ctx)
        return names


class CountsType(click.ParamType):
    """Positive numbers with commas → tuple of int."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            self.fail(f"'{value}': write positive whole numbers, such as 1,2", param, ctx)
        return tuple(dict.fromkeys(int(part) for part in parts))


FORMATS = ChoicesType(("onnx", "tflite", "coreml"))
SIZES = SizesType()
COUNTS = CountsType()
PATH = click.Path(path_type=Path)
