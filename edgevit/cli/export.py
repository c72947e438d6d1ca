"""`edgevit export`: ONNX, TFLite and Core ML files, each checked by running it."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.signature import Size
from edgevit.cli.options import FORMATS, PATH, SIZES

if TYPE_CHECKING:
    from converters.artifact import Artifact


@click.command("export")
@click.argument("source")
@click.option(
    "--weights",
    metavar="FILE|FOLDER|hf:REPO|random",
    help="Weights for a model's name, or random ones.  [default: the library's own, else random]",
)
@click.option(
    "--channel-order",
    type=click.Choice(("RGB", "BGR")),
    help="What the weights were trained on, where their library does not tell: CVNets 0.2 and later, RGB.",
)
@click.option(
    "--format",
    "formats",
    type=FORMATS,
    default="onnx,tflite,coreml",
    show_default=True,
    help="Formats to write, with commas.",
)
@click.option("--sizes", type=SIZES, help="Such as 160,256 or 192x320 (height x width).  [default: those of the run]")
@click.option("--precision", type=click.Choice(("fp32", "fp16")), help="[default: fp16 for coreml, else fp32]")
@click.option(
    "--batch",
    type=click.Choice(("1", "dynamic")),
    default="dynamic",
    show_default=True,
    help="Of ONNX files; TFLite and Core ML files take one picture.",
)
@click.option(
    "--target",
    type=click.Choice(("ios16", "ios17", "ios18")),
    default="ios16",
    show_default=True,
    help="Oldest system for Core ML; with ios18 several sizes share one package.",
)
@click.option("--static", is_flag=True, help="A file for each size, also where one could hold them all.")
@click.option(
    "--input",
    "input_",
    type=click.Choice(("tensor", "image")),
    default="tensor",
    show_default=True,
    help="image: files take uint8 RGB pictures; channel order, scale, mean, std and softmax are inside.",
)
@click.option("--labels", type=PATH, metavar="FILE", help="Class names, one on each line.  [default: the source's]")
@click.option("--rewrites", metavar="NAMES", help="Rewrites to apply, with commas, or none.  [default: all that pay]")
@click.option("--debug-info", is_flag=True, help="Keep the exporter's stack traces in ONNX files.")
@click.option("--keep-failed", is_flag=True, help="Keep a file that misses its tolerance as NAME.unverified.")
@click.option("--out", type=PATH, help="Folder to write into.  [default: artifacts/ of the run, else exports/]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; progress goes to stderr.")
def command(
    source: str,
    weights: str | None,
    channel_order: str | None,
    formats: tuple[str, ...],
    sizes: tuple[Size, ...] | None,
    precision: str | None,
    batch: str,
    target: str,
    static: bool,
    input_: str,
    labels: Path | None,
    rewrites: str | None,
    debug_info: bool,
    keep_failed: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Write ONNX, TFLite and Core ML files of SOURCE, each checked by running it.

    SOURCE is a model's name (see `edgevit models`), a run folder, a checkpoint inside one, timm:NAME,
    torchvision:NAME, hf:FOLDER_OR_REPOSITORY, or python:MODULE:FUNCTION, whose function returns a module and its
    example inputs.

    \b
    edgevit export runs/digits --sizes 32,64,96
    edgevit export mobilevit_s --weights hf:apple/mobilevit-small --sizes 160,256
    edgevit export runs/digits --format coreml --target ios18 --sizes 32,64
    edgevit export timm:resnet18 --weights random --format onnx
    edgevit export python:my_models:small
    edgevit export runs/digits --input image --labels digits.txt --sizes 64

    Every file is run at every size and compared with the model on real pictures. Error is the largest difference as
    a share of the output's standard deviation: at most 1e-4 for fp32 and 2e-2 for fp16, or the command fails with
    exit code 3 and leaves no file.
    """
    from converters.quiet import stdout_to_stderr
    from edgevit.export import export, read_labels
    from edgevit.sources import load_source

    with stdout_to_stderr() if as_json else nullcontext():  # what a module of the user's prints is no JSON
        artifacts = export(
            load_source(source, weights=weights, channel_order=channel_order),
            formats=formats,
            sizes=sizes or (),
            precision=precision,
            batch=1 if batch == "1" else batch,
            target=target,
            static=static,
            input=input_,
            labels=read_labels(labels) if labels else None,
            rewrites=None if rewrites is None else _names(rewrites),
            debug_info=debug_info,
            keep_failed=keep_failed,
            out=out,
            processes=os.cpu_count() or 1,
            progress=lambda line: click.echo(line, err=as_json),
        )
    if as_json:
        click.echo(json.dumps([_as_json(artifact) for artifact in artifacts], indent=2))
        return
    for artifact in artifacts:
        click.echo(_summary(artifact))
    for line in _warnings(artifacts):
        click.echo(line)


def _names(rewrites: str) -> list[str]:
    return [name for part in rewrites.split(",") if (name := part.strip()) not in ("", "none")]


def _as_json(artifact: Artifact) -> dict[str, object]:
    from converters.artifact import size_bytes
    from converters.lint import lint

    meta = artifact.metadata
    return {
        "path": str(artifact.path),
        "format": meta.format,
        "precision": meta.precision,
        "batch": meta.batch,
        "sizes": meta.sizes,
        "size_bytes": size_bytes(artifact.path),
        "notes": meta.notes,
        "verified": [asdict(item) for item in meta.verified],
        "lint": [asdict(finding) for finding in lint(artifact.path)],
    }


def _summary(artifact: Artifact) -> str:
    """The path and size of a file, and below it how closely it agreed at each size."""
    from converters.artifact import size_bytes

    meta = artifact.metadata
    batch = "any batch" if meta.batch == "dynamic" else f"batch {meta.batch}"
    lines = [f"{artifact.path}  {size_bytes(artifact.path) / 1e6:.2f} MB, {meta.precision}, {batch}"]
    for item in meta.verified:
        close = f"error {item.max_abs_over_std:.1e}, SNR {item.snr_db:.0f} dB, cosine {item.cosine:.6f}"
        same = "" if item.top1_agreement is None else f", same top-1 {item.top1_agreement:.0%}"
        lines.append(f"  size {item.size}: {item.output} {close}{same}")
    if meta.format == "coreml":
        lines.append("  checked with the evaluator, not on Apple hardware")
    lines += [f"  note: {note}" for note in meta.notes]
    return "\n".join(lines)


def _warnings(artifacts: list[Artifact]) -> list[str]:
    """What may keep files off an accelerator, each warning once for all files that it is true of."""
    from converters.lint import lint

    files: dict[str, list[str]] = {}
    for artifact in artifacts:
        for finding in lint(artifact.path):
            files.setdefault(finding.line, []).append(artifact.path.name)
    return [f"lint: {line} ({', '.join(names)})" for line, names in files.items()]
