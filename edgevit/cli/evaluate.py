"""`edgevit evaluate`: accuracy by size of a run's weights, or of an exported file in its own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.signature import Size
from edgevit.cli.options import PATH, SIZES

if TYPE_CHECKING:
    from edgevit.evaluation import Evaluated


@click.command()
@click.argument("source", metavar="RUN|FILE", type=PATH)
@click.option("--data", help="digits, fashion-mnist, or a folder of images.  [default: the run's]")
@click.option("--sizes", type=SIZES, help="Sizes, such as 32,64,96.  [default: the run's, or all that FILE offers]")
@click.option("--limit", type=int, help="Evaluate so many images, a fixed choice.  [default: all]")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of the runtime.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    source: Path, data: str | None, sizes: tuple[Size, ...] | None, limit: int | None, threads: int, as_json: bool
) -> None:
    """Top-1 accuracy on held-out images, with its 95 % interval.

    RUN is a run folder: its weights are evaluated, and the figures kept in its runs.db. FILE is an .onnx, .tflite or
    .mlpackage: it is run in its own runtime (Core ML: the saved program, executed on this machine). A file in a run's
    artifacts/ belongs to the run.

    \b
    edgevit evaluate runs/digits
    edgevit evaluate runs/digits/artifacts/mobilevit_xxs.onnx --sizes 64 --limit 200
    """
    from edgevit.evaluation import evaluate

    rows = evaluate(source, data=data, sizes=sizes, limit=limit, threads=threads)
    _print_json(rows) if as_json else _print_table(rows)


def _print_json(rows: list[Evaluated]) -> None:
    import json
    from dataclasses import asdict

    click.echo(
        json.dumps(
            [
                asdict(row.metric)
                | {
                    "size": str(row.key.size),
                    "data": row.data_name,
                    "split": row.key.split,
                    "sha256": row.key.artifact_sha256,
                }
                for row in rows
            ],
            indent=2,
        )
    )


def _print_table(rows: list[Evaluated]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    heads = ("size", "accuracy", "95 % interval", "n", "data")
    cells = [
        (
            row.key.size,
            f"{row.metric.value:.2%}",
            f"{row.metric.low:.2%} – {row.metric.high:.2%}",
            str(row.metric.n),
            f"{row.data_name} {row.key.split}",
        )
        for row in rows
    ]
    if not console.is_terminal:
        for line in (heads, *cells):
            click.echo("\t".join(line))
        return
    table = Table()
    for head in heads:
        table.add_column(head, justify="left" if head == "data" else "right")
    for line in cells:
        table.add_row(*line)
    console.print(table)
