"""A registered model by its name, with or without weights, and what a training run left."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature
from edgevit.models.pretrained import load_weights, read_weights
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.sources.source import RANDOM, Source, weights_sha256


def registered_source(name: str, weights: str | None, num_classes: int | None, channel_order: str | None) -> Source:
    """Without weights, or with "random", random ones, the same every time; `num_classes` is then 1000 by default."""
    if weights in (None, RANDOM):
        if channel_order is not None:
            raise EdgeVitError(f"{name}: the channel order is that of weights; give --weights, or leave it out")
        module = _random(name, 1000 if num_classes is None else num_classes)
        note = f"random weights: {name} was not trained; give weights for a model that knows anything"
        return _source(name, module, Preprocessing(), note=note)
    loaded = read_weights(str(weights), channel_order=channel_order)
    if num_classes is None:
        num_classes = loaded.num_classes or 1000
    module = _random(name, num_classes)
    return _source(name, module, load_weights(module, loaded), loaded.labels)


def trained_source(run: RunFolder, file: Path, num_classes: int | None) -> Source:
    """A run's own weights, classes and preprocessing."""
    name, trained_classes = run.config["model"], run.config["num_classes"]
    if num_classes not in (None, trained_classes):
        raise EdgeVitError(f"{run.path}: was trained with {trained_classes} classes, not {num_classes}")
    if not file.is_file():
        raise EdgeVitError(f"{run.path}: has no {file.name} yet; finish the training with `edgevit train … --resume`")
    module = _random(name, trained_classes)
    load_weights(module, file)
    return _source(name, module, run.preprocessing, run.classes, run)


def _source(
    name: str,
    module: nn.Module,
    preprocessing: Preprocessing,
    labels: tuple[str, ...] = (),
    run: RunFolder | None = None,
    note: str = "",
) -> Source:
    num_classes = len(module.get_parameter("classifier.bias"))
    return Source(
        module=module.eval(),
        name=name,
        signature=Signature.image_classifier(num_classes),
        preprocessing=preprocessing,
        labels=labels if len(labels) == num_classes else (),
        sha256=weights_sha256(module),
        run=run,
        note=note,
    )


def _random(name: str, num_classes: int) -> nn.Module:
    """The same weights every time; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_model(name, num_classes)


def find_run(source: str | Path) -> tuple[RunFolder, Path] | None:
    """The run folder and the file of weights in it that `source` means; None where nothing of that name is there."""
    path = Path(source)
    if path.is_dir():
        run = RunFolder.open(path)
        return run, run.weights_path
    if path.is_file():
        for folder in (path.absolute().parent, path.absolute().parent.parent):
            if RunFolder.stands_at(folder):
                return RunFolder.open(folder), path
        raise EdgeVitError(f"{source}: lies in no run folder; name its model and give the file as weights")
    return None
