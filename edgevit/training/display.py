"""What a training shows: a progress bar on a terminal, a plain line an epoch in a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edgevit.training.checkpoint import Position

OnStep = Callable[[Position, float], None]
OnEpoch = Callable[[dict[str, Any]], None]


@contextmanager
def display() -> Iterator[tuple[OnStep, OnEpoch]]:
    """The two callbacks that `edgevit.training.loop.train` takes."""
    console = Console(highlight=False, soft_wrap=True)
    columns = (
        TextColumn("epoch {task.fields[epoch]}  step {task.fields[step]}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal and is_main_process()
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        bar = progress.add_task("training", total=1.0, epoch=1, step=0)

        def on_step(position: Position, fraction: float) -> None:
            progress.update(bar, completed=fraction, epoch=position.epoch + 1, step=position.step)

        def on_epoch(line: dict[str, Any]) -> None:
            console.print(describe(line))

        yield on_step, on_epoch


def is_main_process() -> bool:
    """Whether this is the process that speaks for all under `accelerate launch`."""
    return os.environ.get("RANK", "0") == "0"


def describe(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl for people."""
    text = f"epoch {line['epoch']:3}  step {line['step']:6}  loss {line['loss']:.4f}  lr {line['lr']:.1e}"
    text += f"  {line['images'] / line['seconds']:.0f} images/s"
    if accuracy := line.get("accuracy"):
        text += "  accuracy " + "  ".join(f"{size}: {value:.1%}" for size, value in accuracy.items())
    return text
