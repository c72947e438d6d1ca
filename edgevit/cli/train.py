"""`edgevit train`: options in, a run folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.signature import Size
from edgevit.cli.options import PATH, SIZES, SizesType


class SizeType(SizesType):
    """One size: `64` or `192x320`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Size):
            return value
        sizes = super().convert(value, param, ctx)
        return sizes[0] if len(sizes) == 1 else self.fail(f"'{value}': give one size", param, ctx)


@click.command(epilog="In several processes: accelerate launch --num_processes 2 $(which edgevit) train …")
@click.argument("model", required=False)
@click.option("--data", help="digits, fashion-mnist, or a folder of images.  [required, but for --resume]")
@click.option(
    "--sizes",
    type=SIZES,
    help="Sizes to draw from.  [default: 32,64,96 for the two named sets, else 160,192,256,288,320]",
)
@click.option("--out", type=PATH, required=True, help="Run folder to write.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out; options come from there.")
@click.option("--epochs", type=int, help="Passes over the images.  [default: digits 30, fashion-mnist 5, else 300]")
@click.option("--batch-size", type=int, help="Images per step and process at the base size.  [default: by data set]")
@click.option("--base-size", type=SizeType(), help="Size that --batch-size is meant at.  [default: the middle one]")
@click.option("--lr", type=float, help="Highest learning rate.  [default: 0.002]")
@click.option("--warmup-steps", type=int, help="Steps until it is reached.  [default: by data set]")
@click.option("--weight-decay", type=float, help="Of AdamW, for all but norms and biases.  [default: 0.01]")
@click.option("--label-smoothing", type=float, help="Share of each target spread evenly.  [default: 0.1]")
@click.option("--ema-decay", type=float, help="Of the averaged weights, late in training.  [default: 0.9995]")
@click.option(
    "--dropout", type=float, help="Share of features dropped.  [default: the model's paper's, or by data set]"
)
@click.option("--augment", help="none, light, standard; auto is what suits the data.  [default: auto, or by data set]")
@click.option("--seed", type=int, help="Of weights, order, sizes, augmentation and dropout.  [default: 0]")
@click.option("--init", metavar="WEIGHTS", help="Weights to start from: a file, a folder, or hf:REPO.")
@click.option("--precision", type=click.Choice(["no", "bf16", "fp16"]), help="Mixed precision.  [default: no]")
@click.option("--max-steps", type=int, help="End after so many steps.")
@click.option("--max-cpu-seconds", type=float, help="End after so much CPU time of this process.")
@click.option("--workers", type=int, help="Processes that prepare images.  [default: by data set]")
@click.option("--threads", type=int, help="CPU threads of torch.  [default: torch's own]")
def command(model: str | None, data: str | None, sizes: tuple[Size, ...] | None, out: Path, **options: Any) -> None:
    """Train MODEL into a run folder, on images whose size changes from step to step.

    The folder holds config.toml, model.safetensors (averaged weights), metrics.jsonl (a line an epoch) and state/
    (for --resume). Ctrl-C saves before it stops.

    \b
    edgevit train mobilevit_xxs --data digits --sizes 32,64,96 --out runs/digits
    edgevit train --resume --out runs/digits
    """
    from edgevit.training.display import display, is_main_process
    from edgevit.training.loop import train
    from edgevit.training.signals import Interrupted

    resume = options.pop("resume")
    config = _config(model, data, sizes, out, resume, options)
    with display() as (on_step, on_epoch):
        try:
            run = train(config, out, resume=resume, on_step=on_step, on_epoch=on_epoch)
        except Interrupted as stopped:
            if is_main_process():
                click.echo(f"edgevit: {stopped}; go on with: edgevit train --resume --out {out}", err=True)
            click.get_current_context().exit(130)
    if is_main_process():
        click.echo(f"weights in {run.weights_path}")


def _config(
    model: str | None,
    data: str | None,
    sizes: tuple[Size, ...] | None,
    out: Path,
    resume: bool,
    options: dict[str, Any],
) -> Any:
    """A resumed run brings its options; one that is given again must not differ, which `train` checks."""
    from dataclasses import replace

    from edgevit.run_folder import RunFolder
    from edgevit.training.config import TrainConfig, default_sizes, locate

    given = {"model": model, "data": data and locate(data), "sizes": sizes} | options
    if resume:
        earlier = TrainConfig.from_toml(RunFolder.open(out).config)
        return replace(earlier, **{name: value for name, value in given.items() if value is not None})
    for name, what in (("model", "MODEL"), ("data", "--data")):
        if not given[name]:
            raise click.UsageError(f"give {what} (or --resume)")
    return TrainConfig.of(**given | {"sizes": sizes or default_sizes(given["data"])})
