"""`edgevit report`: one HTML page and its Markdown twin from a run's measurements."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from converters.errors import EdgeVitError
from edgevit.cli.options import PATH


@click.command()
@click.argument("run", type=PATH)
@click.option("--db", type=PATH, help="Measurements to read.  [default: RUN/runs.db]")
@click.option("--out", type=PATH, help="Page to write; a .md twin goes beside it.  [default: RUN/report.html]")
@click.option("--budget-ms", type=float, help="Pick the most accurate file within this latency.  [default: no budget]")
@click.option("--title", help="Heading of the page.  [default: the models and the device]")
@click.option("--json", "as_json", is_flag=True, help="Print paths and sentences as JSON.")
def command(
    run: Path, db: Path | None, out: Path | None, budget_ms: float | None, title: str | None, as_json: bool
) -> None:
    """Say what to ship, in one HTML page and a Markdown twin.

    Reads what `edgevit sweep RUN` measured. Without a budget it picks the fastest file on the Pareto front whose
    accuracy cannot be told from the best; with --budget-ms, the most accurate file that stays within it. The page
    needs no network: charts and styles are inside.

    \b
    edgevit report runs/digits
    edgevit report runs/digits --budget-ms 20 --out review.html
    """
    from profiles.report import make_report, save_report
    from profiles.store import Store

    db_path = db or run / "runs.db"
    if not db_path.is_file():
        raise EdgeVitError(f"{db_path}: no such file; run `edgevit sweep {run}` first")
    words = ["edgevit", "report", str(run)] + (["--db", str(db)] if db else [])
    words += ["--budget-ms", f"{budget_ms:g}"] if budget_ms is not None else []
    sweep = ["edgevit", "sweep", str(run)] + (["--db", str(db)] if db else [])
    report = make_report(
        Store(db_path), title=title, budget_ms=budget_ms, commands=(shlex.join(sweep), shlex.join(words))
    )
    html_path, markdown_path = save_report(report, out or run / "report.html")
    if as_json:
        import json

        click.echo(json.dumps({"html": str(html_path), "markdown": str(markdown_path), "ship": report.sentences}))
        return
    click.echo(html_path)
    click.echo(markdown_path)
    for sentence in report.sentences:
        click.echo(sentence)
