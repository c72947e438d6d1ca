"""What every command prints with: text from files made harmless, and one table, rich on a terminal, plain in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

import click

NAME_WIDTH = 12  # a terminal that leaves the first column less gets plain lines


def printable(text: str) -> str:
    """`text` with what a terminal would act on, or not show, as escapes: a name in a file may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Prints `rows`; the first column is a name, the others are figures and stand to the right."""
    from rich.console import Console

    console = Console()
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if console.is_terminal and sum(widths[1:]) + len(widths) + NAME_WIDTH <= console.width:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns):  # on a narrow terminal the name gives way, the figures stay whole
            table.add_column(column, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    for row in [columns, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        click.echo("  ".join(cells).rstrip())
