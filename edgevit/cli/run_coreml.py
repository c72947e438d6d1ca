"""`edgevit run-coreml`: a Core ML package on arrays, without a Mac."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgevit.cli.options import PATH

if TYPE_CHECKING:
    import numpy as np

    from converters.mil_package import ValueType


@click.command("run-coreml")
@click.argument("package", type=PATH)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[NAME=]FILE.npy",
    help="An input; the name may be left out where there is one. Once for each input.",
)
@click.option("--function", help="Of a package with several.  [default: the package's own]")
@click.option("--output", type=PATH, help="Folder for the outputs, one .npy each.  [default: none is written]")
@click.option("--ranges", is_flag=True, help="Also the largest magnitude of every op, computed in fp32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    package: Path, inputs: tuple[str, ...], function: str | None, output: Path | None, ranges: bool, as_json: bool
) -> None:
    """Run a Core ML PACKAGE on arrays, on any machine.

    PACKAGE is any .mlpackage that holds an ML Program, this project's or another's. Its ops are computed with torch:
    that checks the program and its weights, not Apple's hardware. Without --input it lists what the program takes.
    Pictures are uint8 (1, H, W, 3), RGB.

    \b
    edgevit run-coreml exports/mobilevit_xxs-256.mlpackage
    edgevit run-coreml exports/mobilevit_xxs-256.mlpackage --input picture.npy --output outputs/
    edgevit run-coreml model.mlpackage --input image=a.npy --input mask=b.npy --function size_256 --json
    """
    from converters.mil import Program
    from converters.mil_files import read_inputs, write_arrays
    from converters.quiet import quiet

    with quiet():
        program = Program(package)
    if not inputs:
        _print_ports(program, function, as_json)
        return
    arrays = read_inputs(program, inputs, function)
    results = program.run(arrays, function)
    reached = program.ranges(arrays, function) if ranges else {}
    if output is not None:
        write_arrays(output, results)
    if as_json:
        found = {name: _figures(array) for name, array in results.items()}
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in reached.items()}
        click.echo(json.dumps({"outputs": found} | ({"ranges": numbers} if ranges else {}), indent=2))
        return
    from edgevit.cli.tables import print_table

    columns = ("dtype", "shape", "min", "max", "not finite", "label")
    shown = [name for name in columns if any(name in _figures(array) for array in results.values())]
    print_table(
        ["output", *shown],
        [[name, *(_text(_figures(array).get(column, "")) for column in shown)] for name, array in results.items()],
    )
    if ranges:
        print_table(["value", "reaches"], [[name, _text(value)] for name, value in reached.items()])


def _print_ports(program: Any, function: str | None, as_json: bool) -> None:
    sides = {"input": program.inputs(function), "output": program.outputs(function), "state": program.states(function)}
    if as_json:
        ports = {side: {name: _port(kind) for name, kind in kinds.items()} for side, kinds in sides.items()}
        click.echo(json.dumps({"functions": program.functions, **ports}, indent=2))
        return
    from edgevit.cli.tables import print_table

    rows = [
        [name, side, kind.dtype, _shape(kind.shape)] for side, kinds in sides.items() for name, kind in kinds.items()
    ]
    print_table(["name", "is", "dtype", "shape"], rows)
    if len(program.functions) > 1:
        click.echo(f"functions: {', '.join(program.functions)}; the default is {program.default_function}")


def _port(kind: ValueType) -> dict[str, object]:
    return {"dtype": kind.dtype, "shape": kind.shape}


def _figures(array: np.ndarray) -> dict[str, object]:
    """What is worth knowing of an output; text has no range."""
    if array.dtype.kind == "U":
        return {"dtype": "text", "shape": list(array.shape), "label": ", ".join(array.flatten())}
    import numpy as np

    found: dict[str, object] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    finite = array[np.isfinite(array)]
    if finite.size:
        found |= {"min": float(finite.min()), "max": float(finite.max())}
    if finite.size < array.size:
        found["not finite"] = array.size - finite.size
    return found


def _text(value: object) -> str:
    if isinstance(value, list):
        return _shape(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shape(shape: Iterable[int | None]) -> str:
    return " × ".join("any" if size is None else str(size) for size in shape)
