"""One table for every command: rich on a terminal, aligned plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

import click


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Prints `rows`; the first column is a name, the others are figures and stand to the right."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        click.echo("  ".join(cells).rstrip())
