"""The command line. Each command lives in its own file and is imported only when it is called or asked for help."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

import click

from converters.errors import EdgeVitError
from edgevit.cli.tables import printable

# name → one line for `edgevit --help`; the command itself is `edgevit/cli/NAME.py`'s `command`.
COMMANDS = {
    "models": "List the models that can be trained and exported.",
    "data": "List data sets, or fetch one: `edgevit data get fashion-mnist`.",
    "train": "Train a model with the multi-scale sampler into a run folder.",
    "evaluate": "Accuracy of a run or of an exported file, by size.",
    "export": "Write ONNX, TFLite and Core ML files, each checked by running it.",
    "formats": "What each format can do here: sizes, precision, batch, what runs it.",
    "inspect": "What a model file holds, and where it may fall off an accelerator.",
    "verify": "Compare a saved file with its model at every size; name the module that differs.",
    "run-coreml": "Run a Core ML package on arrays, without a Mac.",
    "profile": "Latency of an exported file on this machine.",
    "sweep": "Latency and accuracy over sizes, formats and threads, into runs.db.",
    "report": "One HTML page (and Markdown) from a run's measurements.",
}


class _Commands(click.Group):
    """Lists commands without importing them; turns EdgeVitError into one line and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"edgevit.cli.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except EdgeVitError as error:
            if ctx.params["debug"]:
                raise
            click.echo(f"edgevit: {printable(str(error))}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("edgevit: interrupted", err=True)
            ctx.exit(130)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="edgevit")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Vision transformers for phones: train, export, measure, choose.

    \b
    edgevit train mobilevit_xxs --data digits --sizes 32,64,96 --out runs/digits
    edgevit export runs/digits --format onnx,tflite,coreml --sizes 32,64,96
    edgevit sweep runs/digits
    edgevit report runs/digits
    """
    # Threads that wait by spinning make a training dozens of times slower as soon as another process wants a core;
    # threads that never spin, a third slower when none does. OpenMP reads this when torch is loaded, which is later.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if threading.current_thread() is threading.main_thread():  # being told to end leaves as little behind as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
