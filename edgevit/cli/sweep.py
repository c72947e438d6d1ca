"""`edgevit sweep`: latency and accuracy over sizes, formats and threads, into runs.db."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.signature import Size
from edgevit.cli.options import COUNTS, FORMATS, PATH, SIZES

if TYPE_CHECKING:
    from edgevit.sweep import SweepOutcome
    from profiles.store import Measurement
    from profiles.sweep import Progress

COLUMNS = ("file", "size", "thr", "median", "[95 %] ms", "CPU", "wall/CPU", "accuracy", "points")


@click.command()
@click.argument("run", type=PATH)
@click.option("--format", "formats", type=FORMATS, default="onnx,tflite,coreml", show_default=True)
@click.option("--sizes", "--size", type=SIZES, help="[default: those of the run, or that the files hold]")
@click.option("--threads", type=COUNTS, default="1", show_default=True, help="Threads, a measurement for each.")
@click.option("--processes", type=int, default=3, show_default=True, help="Fresh processes a measurement, at least 3.")
@click.option("--time-limit", type=float, default=120, show_default=True, help="Seconds that one process may take.")
@click.option("--data", help="Held-out pictures for accuracy.  [default: those of the run]")
@click.option("--limit", type=int, default=2000, show_default=True, help="Pictures that accuracy is measured on.")
@click.option("--db", type=PATH, help="[default: runs.db in the run, or beside the files]")
@click.pass_context
def command(
    ctx: click.Context,
    run: Path,
    formats: tuple[str, ...],
    sizes: tuple[Size, ...] | None,
    threads: tuple[int, ...],
    processes: int,
    time_limit: float,
    data: str | None,
    limit: int,
    db: Path | None,
) -> None:
    """Latency and accuracy of every file of RUN, at every size, into runs.db.

    RUN is a run folder, a folder of exported files, or one file. What a run has not exported yet is exported first.
    Accuracy is each file's own, in its own runtime, on the held-out pictures. Kill it at any moment and run it again:
    what is finished stays, the rest is done. Exit code 1 when something has no result; the reasons are listed. Points
    are the file's accuracy less the checkpoint's at that size, in percentage points.

    \b
    edgevit sweep runs/digits
    edgevit sweep runs/digits --format onnx,tflite --threads 1,2
    edgevit sweep exports --data fashion-mnist --sizes 64,96
    """
    from edgevit.sweep import sweep

    with _reporter() as report:
        outcome = sweep(
            run,
            formats=formats,
            sizes=sizes or (),
            threads=threads,
            processes=processes,
            time_limit_s=time_limit,
            data=data,
            limit=limit,
            db=db,
            progress=report,
        )
    _print(outcome)
    if outcome.result.failures:
        ctx.exit(1)


@contextmanager
def _reporter() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; in a pipe a plain line a step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console()
    if not console.is_terminal:
        yield lambda step: click.echo(f"[{step.done}/{step.total}] {step.text}" if step.total else step.text)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)

        def report(step: Progress) -> None:
            bar.update(task, completed=step.done, total=step.total or None, description=step.text)
            if not step.total:
                bar.console.print(step.text, markup=False, highlight=False)

        yield report


def _print(outcome: SweepOutcome) -> None:
    from edgevit.cli.tables import print_table

    result = outcome.result
    accuracy = {(key.artifact_sha256, key.size): metric.value for key, metric in result.metrics}
    checkpoint = {size: metric.value for size, metric in outcome.checkpoint.items()}
    rows = [_row(item, accuracy, checkpoint) for item in result.measurements]
    if rows:
        print_table(COLUMNS, rows)
    for failure in result.failures:
        click.echo(f"no result: {failure.what}: {failure.reason}")
    click.echo(f"{len(result.measurements)} measurements and {len(result.metrics)} accuracies in {outcome.db}")


def _row(item: Measurement, accuracy: dict[tuple[str, str], float], checkpoint: dict[str, float]) -> tuple[str, ...]:
    size, summary = item.cell.size, item.summary
    if item.status == "ok":
        ratio = summary["wall_per_cpu"]
        times = (
            f"{summary['median_ms']:.2f}",
            f"[{summary['median_low_ms']:.2f}, {summary['median_high_ms']:.2f}]",
            f"{summary['cpu_median_ms']:.2f}",
            "–" if ratio is None else f"{ratio:.2f}",
        )
    else:
        times = (item.status.replace("_", " "), "", "", "")
    value, own = accuracy.get((item.cell.artifact_sha256, size)), checkpoint.get(size)
    shown = "" if value is None else f"{value:.2%}"
    difference = "" if value is None or own is None else f"{100 * (value - own):+.2f}"
    return (item.artifact["name"], size, str(item.cell.threads), *times, shown, difference)
