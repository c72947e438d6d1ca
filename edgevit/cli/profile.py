"""`edgevit profile`: latency of an exported file on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.errors import EdgeVitError, ParityError
from converters.signature import Size
from edgevit.cli.options import COUNTS, PATH, SIZES

if TYPE_CHECKING:
    from profiles.store import Measurement

COLUMNS = ("size", "thr", "median", "[95 %] ms", "p90", "p99", "min", "CPU", "wall/CPU", "load", "MB")


@click.command()
@click.argument("file", type=PATH)
@click.option("--sizes", "--size", type=SIZES, help="Sizes to measure.  [default: all that the file holds]")
@click.option("--threads", type=COUNTS, default="1", show_default=True, help="Threads, one row for each.")
@click.option("--processes", type=int, default=3, show_default=True, help="Fresh processes for each row, at least 3.")
@click.option("--time-limit", type=float, default=120, show_default=True, help="Seconds that one process may take.")
@click.option("--json", "as_json", is_flag=True, help="Every sample and circumstance, as a JSON list.")
def command(
    file: Path,
    sizes: tuple[Size, ...] | None,
    threads: tuple[int, ...],
    processes: int,
    time_limit: float,
    as_json: bool,
) -> None:
    """Latency of FILE (.onnx, .tflite) on this machine.

    Each row comes from several fresh processes; each warms up until steady, then times every run. The interval is the
    95 % one of the median, resampled over processes, then runs. CPU is the median CPU time of a run, all threads
    together; wall/CPU well above 1 says that the machine was busy. FILE's own golden output is checked on the way.
    docs/profiling.md explains each column.

    \b
    edgevit profile mobilevit_s.onnx
    edgevit profile mobilevit_s.tflite --sizes 160,256 --threads 1,2
    """
    import dataclasses
    import json

    measurements = _measure(file, sizes, threads, processes, time_limit, quiet=as_json)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(item) for item in measurements], indent=1))
    else:
        _print(file, measurements)
    failed = [item for item in measurements if item.status == "failed"]
    wrong = [item for item in measurements if item.status == "wrong_on_device"]
    if failed:
        raise EdgeVitError(f"{file}: {failed[0].reason}")
    if wrong:
        raise ParityError(f"{file}: wrong on this device: {wrong[0].reason}")


def _measure(
    file: Path,
    sizes: tuple[Size, ...] | None,
    threads: tuple[int, ...],
    processes: int,
    time_limit: float,
    *,
    quiet: bool,
) -> list[Measurement]:
    from rich.console import Console

    from profiles.inputs import sizes_of
    from profiles.profile import profile

    console = Console(stderr=True)
    measurements = []
    with console.status("starting") as status:
        for size in sizes or sizes_of(file):
            for count in threads:
                name = f"{file.name}, size {size or 'fixed'}, {count} thread{'s' * (count > 1)}"

                def report(line: str, name: str = name) -> None:
                    status.update(f"{name}: {line}")
                    if not console.is_terminal and not quiet:
                        click.echo(f"{name}: {line}", err=True)

                measurements.append(
                    profile(
                        file, size=size, threads=count, processes=processes, time_limit_s=time_limit, progress=report
                    )
                )
    return measurements


def _print(file: Path, measurements: list[Measurement]) -> None:
    from edgevit.cli.tables import print_table
    from profiles.profile import is_busy

    timed = [item for item in measurements if item.summary]
    if timed:
        print_table(COLUMNS, [_row(item) for item in timed], title=str(file))
        where = timed[0].circumstances
        cell = timed[0].cell
        click.echo(
            f"{cell.runtime} {cell.runtime_version} on {', '.join(where['ran_on'])}; {where['machine']['cpu']}, "
            f"{where['machine']['cores']} cores; {timed[0].summary['processes']} processes a row; "
            f"load average before {where['load_average_before']}; checked against {where['check']}"
        )
    for item in measurements:
        if item.status == "not_run":
            click.echo(f"{file}: {item.reason}")
    if busy := [item for item in timed if is_busy(item.summary)]:
        ratio = max(item.summary["wall_per_cpu"] for item in busy)
        click.echo(
            f"note: the machine is busy: runs took up to {ratio:.1f} times their CPU time. Compare CPU times, or "
            "repeat when it is quiet."
        )


def _row(item: Measurement) -> tuple[str, ...]:
    s: dict[str, Any] = item.summary
    ratio = "–" if s["wall_per_cpu"] is None else f"{s['wall_per_cpu']:.2f}"
    times = [_ms(s[name]) for name in ("p90_ms", "p99_ms", "min_ms", "cpu_median_ms")]
    interval = f"[{_ms(s['median_low_ms'])}, {_ms(s['median_high_ms'])}]"
    load = f"{s['load_ms']:.0f}"
    memory = f"{s['peak_memory_mb']:.0f}"
    return (item.cell.size, str(item.cell.threads), _ms(s["median_ms"]), interval, *times, ratio, load, memory)


def _ms(value: float) -> str:
    """Three significant digits are all that a measurement like this holds."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
