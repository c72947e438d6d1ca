"""`edgevit verify`: a saved file against the model it was made of."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.signature import Size
from edgevit.cli.options import PATH, SIZES

if TYPE_CHECKING:
    from converters.bisect import Bisection
    from converters.verify import Verification

ROWS_BEFORE, ROWS_AFTER = 8, 3


@click.command("verify")
@click.argument("file", type=PATH)
@click.option("--against", required=True, metavar="SOURCE", help="A model's name, a run folder or a checkpoint.")
@click.option("--weights", metavar="FILE|FOLDER|hf:REPO", help="Weights for a model's name, as `edgevit export` takes.")
@click.option("--channel-order", type=click.Choice(("RGB", "BGR")), help="What the weights were trained on.")
@click.option(
    "--size",
    "--sizes",
    "sizes",
    type=SIZES,
    help="Such as 160,256 or 192x320 (height x width).  [default: those that the file names]",
)
@click.option("--bisect", "bisects", is_flag=True, help="Name the first module whose output differs, in a table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; progress goes to stderr.")
def command(
    file: Path,
    against: str,
    weights: str | None,
    channel_order: str | None,
    sizes: tuple[Size, ...] | None,
    bisects: bool,
    as_json: bool,
) -> None:
    """Run FILE at every size it offers and compare it with SOURCE's module, on real inputs.

    FILE is any .onnx, .tflite or .mlpackage, of this project or of another maker.

    \b
    edgevit verify exports/mobilevit_s.onnx --against mobilevit_s --weights hf:apple/mobilevit-small
    edgevit verify runs/digits/artifacts/mobilevit_xxs.tflite --against runs/digits
    edgevit verify stranger.onnx --against runs/digits --size 96 --bisect

    Error is the largest difference as a share of the output's standard deviation. When an output misses what its
    precision allows, the exit code is 3 and the worst output and size are named. --bisect compares intermediate
    values too: the module's, traced by torch.export, with those of every node in the file.
    """
    from converters.quiet import stdout_to_stderr
    from converters.verify import bisect_at, verify
    from edgevit.samples import sample_inputs
    from edgevit.sources import load_source

    def progress(line: str) -> None:
        click.echo(line, err=as_json)

    with stdout_to_stderr() if as_json else nullcontext():  # what a module of the user's prints is no JSON
        source = load_source(against, weights=weights, channel_order=channel_order)
        samples = sample_inputs(source, progress)
        inside = source.preprocessing
        result = verify(
            file, source.module, source.signature, samples, sizes=sizes or (), preprocessing=inside, progress=progress
        )
        bisection = None
        if bisects:
            size = result.worst_size
            progress(f"{file.name}: comparing intermediate values at size {size}")
            bisection = bisect_at(file, source.module, source.signature, samples, size, preprocessing=inside)
    if as_json:
        click.echo(json.dumps(_as_json(result, bisection), indent=2))
    else:
        _print(result, bisection)
    if result.failure is not None:
        raise result.failure


def _as_json(result: Verification, bisection: Bisection | None) -> dict[str, object]:
    return {
        "path": str(result.path),
        "precision": result.precision,
        "verified": [asdict(item) for item in result.verified],
        "notes": result.notes,
        "failure": None if result.failure is None else str(result.failure),
        "bisection": bisection
        and {
            "sentence": bisection.sentence,
            "culprit": bisection.culprit and asdict(bisection.culprit),
            "steps": [asdict(step) for step in bisection.steps],
        },
    }


def _print(result: Verification, bisection: Bisection | None) -> None:
    from edgevit.cli.tables import print_table

    for line in result.notes:
        click.echo(f"note: {line}")
    if result.verified:
        columns = ("output", "size", "max abs / std", "SNR dB", "cosine", "top-1")
        rows = [
            (
                item.output,
                item.size,
                f"{item.max_abs_over_std:.1e}",
                f"{item.snr_db:.0f}",
                f"{item.cosine:.6f}",
                "" if item.top1_agreement is None else f"{item.top1_agreement:.0%}",
            )
            for item in result.verified
        ]
        print_table(columns, rows)
    if bisection is not None:
        _print_steps(bisection)
        if bisection.culprit is None and result.failure is not None:
            click.echo(
                "no module differs: the fault lies in optimised kernels, in what follows the module's last operation, "
                "in how outputs are wired, or in other examples than the first"
            )
        else:
            click.echo(bisection.sentence)
    if result.failure is None:
        click.echo(f"{result.path}: agrees with the module ({result.precision})")


def _print_steps(bisection: Bisection) -> None:
    """The nodes around the culprit; all of them would be hundreds of rows, and --json has them."""
    from edgevit.cli.tables import print_table

    steps = bisection.steps
    if bisection.culprit is not None:
        place = steps.index(bisection.culprit)
        shown = steps[max(0, place - ROWS_BEFORE) : place + ROWS_AFTER + 1]
        columns = ("module", "op", "shape", "source", "error / std", "verdict")
        rows = [
            (
                step.module or "(outermost)",
                step.op,
                "×".join(map(str, step.shape)),
                step.source,
                "" if step.error is None else f"{step.error:.1e}",
                step.verdict,
            )
            for step in shown
        ]
        print_table(columns, rows)
    counts = Counter(step.verdict for step in steps)
    click.echo(f"of {len(steps)} operations: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
