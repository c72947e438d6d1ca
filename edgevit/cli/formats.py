"""`edgevit formats`: what each format can do here."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("formats")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, for machines.")
def command(as_json: bool) -> None:
    """List the formats that `edgevit export` writes, and what each can do here.

    Precisions: the default first. Sizes: how a file holds several. Runs with: what executes the saved file on this
    machine, to check it. How long an export takes depends on the model and on how often it is converted: `edgevit
    export` prints the seconds of every file.

    \b
    edgevit formats
    edgevit formats --json
    """
    from converters.capabilities import capabilities
    from edgevit.cli.tables import print_table

    found = capabilities()
    if as_json:
        click.echo(json.dumps([asdict(item) for item in found], indent=2))
        return
    columns = ("format", "suffix", "precision", "several sizes", "batch", "input", "converted", "runs here with")
    rows = [
        (
            f"{item.format} ({', '.join(item.targets)})" if item.targets else item.format,
            item.suffix,
            ", ".join(item.precisions),
            item.sizes,
            item.batch,
            ", ".join(item.inputs),
            item.converts,
            item.runs_with,
        )
        for item in found
    ]
    print_table(columns, rows)
