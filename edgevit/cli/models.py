"""`edgevit models`"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from edgevit.models.summary import ModelSummary


@click.command()
@click.option("--json", is_flag=True, help="One JSON list, for machines.")
def command(json: bool) -> None:
    """List the models that can be trained and exported.

    Parameters are those of the 1,000-class model; GFLOPs are of one 256 x 256 picture, a multiply-add counting as
    two; top-1 is what the paper reports on ImageNet-1k.

    \b
    edgevit models
    edgevit models --json
    """
    from edgevit.models.summary import models

    summaries = models()
    if json:
        click.echo(json_format.dumps([asdict(summary) for summary in summaries], indent=2))
    else:
        _print(summaries)


def _print(summaries: list[ModelSummary]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("model", "parameters (M)", "GFLOPs at 256", "top-1 (%)", "paper")
    rows = [
        (
            summary.name,
            f"{summary.parameters / 1e6:.2f}",
            f"{summary.flops_256 / 1e9:.2f}",
            "" if summary.published_top1 is None else f"{summary.published_top1:.1f}",
            summary.paper,
        )
        for summary in summaries
    ]
    console = Console()
    if not console.is_terminal:
        for row in (columns, *rows):
            click.echo("\t".join(row))
        return
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "paper") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
