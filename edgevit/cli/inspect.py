"""`edgevit inspect`: what a model file holds, and where it may fall off an accelerator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgevit.cli.options import PATH
from edgevit.cli.tables import printable

if TYPE_CHECKING:
    from converters.artifact import Metadata
    from converters.contents import Function, Value
    from converters.inspection import Inspection

SHOWN_LABELS = 3


@click.command("inspect")
@click.argument("file", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every layer that a warning names.")
def command(file: Path, as_json: bool) -> None:
    """Show what FILE holds, without running it: any .onnx, .tflite or .mlpackage, of this project or of another maker.

    Inputs and outputs of every signature or function, operations by type, stored numbers by dtype (what functions
    share is counted once), size on disk with its sidecars, what the file says of itself, and lint: warnings where it
    may fall off an accelerator, each with a source (docs/lint.md).

    \b
    edgevit inspect exports/mobilevit_s.tflite
    edgevit inspect stranger.onnx --json
    """
    from converters.inspection import inspect

    inspection = inspect(file)
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2))
        return
    for line in _lines(inspection):
        click.echo(printable(line))


def _lines(inspection: Inspection) -> Iterator[str]:
    from converters.inspection import operations

    contents = inspection.contents
    made_by = f", written by {contents.producer}" if contents.producer else ""
    yield f"{contents.path}: {contents.format}, {contents.target}{made_by}"
    yield f"size on disk: {contents.size_bytes / 1e6:.2f} MB in {_counted(len(contents.files), 'file')}"
    if inspection.parameters:
        yield f"numbers stored: {_amounts(inspection.parameters)}"
    if inspection.compressed:
        yield f"compressed: {_amounts(inspection.compressed)}"
    for problem in inspection.problems:
        yield f"problem: {problem}"
    for function in contents.functions:
        yield ""
        yield f"{function.name}:"
        yield from _ports(function)
        listed = ", ".join(f"{kind} {count}" for kind, count in operations(function).items())
        yield f"  {_counted(len(function.nodes), 'operation')}: {listed or 'none'}"
    yield ""
    if inspection.artifact is not None:
        yield from _metadata(inspection.artifact)
    for key, text in contents.metadata.items():
        yield f"metadata {key}: {text if len(text) <= 80 else text[:77] + '…'}"
    if inspection.labels:
        shown = ", ".join(inspection.labels[:SHOWN_LABELS])
        yield f"labels: {len(inspection.labels)} ({shown}{', …' if len(inspection.labels) > SHOWN_LABELS else ''})"
    if not inspection.findings:
        yield "lint: nothing found"
    for finding in inspection.findings:
        yield f"lint: {finding.line}"


def _ports(function: Function) -> Iterator[str]:
    for side, values in (("input", function.inputs), ("output", function.outputs), ("state", function.states)):
        for value in values:
            yield f"  {side:6} {value.name}: {_written(value)}"


def _written(value: Value) -> str:
    shape = "" if value.shape is None else " × ".join("?" if length is None else str(length) for length in value.shape)
    note = f" ({value.note})" if value.note else ""
    return f"{value.dtype or 'unknown'} {shape}".rstrip() + note


def _metadata(meta: Metadata) -> Iterator[str]:
    batch = "any batch" if meta.batch == "dynamic" else f"batch {meta.batch}"
    yield f"edgevit: {meta.model}, {meta.precision}, sizes {', '.join(meta.sizes)}, {batch}"
    yield f"  the model has {_amount(meta.parameters)} parameters; made with {_versions(meta)}"
    if meta.preprocessing is not None:
        how = meta.preprocessing
        yield (
            f"  preprocessing: size {how.size}, crop {how.crop_fraction:g}, {how.interpolation}, {how.channel_order}, "
            f"(v × {how.scale:.6g} − {_list(how.mean)}) / {_list(how.std)}"
        )
    for item in meta.verified:
        top1 = "" if item.top1_agreement is None else f", top-1 {item.top1_agreement:.0%}"
        error = f"error {item.max_abs_over_std:.1e}, SNR {item.snr_db:.0f} dB"
        yield f"  verified at {item.size}: {item.output} {error}{top1}"
    for note in meta.notes:
        yield f"  note: {note}"


def _versions(meta: Metadata) -> str:
    return ", ".join(f"{name} {version}" for name, version in meta.versions.items())


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _amounts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_amount(count)}" for name, count in counts.items())


def _amount(count: int) -> str:
    """`5.0 M`, `1.2 k`, `7`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
