"""What can be exported or evaluated: a registered model, with or without weights, or what a training run left."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature
from edgevit.models.pretrained import load_weights, read_weights
from edgevit.models.registry import create_model, list_models
from edgevit.run_folder import RunFolder


@dataclass(frozen=True)
class Source:
    """A module, ready to be run, and what an artifact made of it should carry."""

    module: nn.Module  # in evaluation mode
    name: str  # the registered model's, such as "mobilevit_xxs"
    signature: Signature
    preprocessing: Preprocessing
    labels: tuple[str, ...]  # one per class, or none where nobody named them
    sha256: str  # of the weights
    run: RunFolder | None = None
    note: str = ""  # a warning that the user should see, else ""


def load_source(
    source: str | Path, *, weights: str | None = None, num_classes: int | None = None, channel_order: str | None = None
) -> Source:
    """`source`: a registered model's name, a run folder, or a checkpoint file inside a run folder.

    A name takes `weights` (a file, a folder or `hf:OWNER/NAME`; `channel_order` as in `load_weights`) and as many
    classes as they have. Without weights it gets random ones, the same every time, and `note` says so; then
    `num_classes` is 1000 by default. A run has its own weights, classes and preprocessing.

    Raises EdgeVitError for anything else, and for weights that do not fit.
    """
    if str(source) in list_models():
        return _registered(str(source), weights, num_classes, channel_order)
    run, file = _find_run(source)
    if weights is not None or channel_order is not None:
        raise EdgeVitError(f"{source}: a run has weights of its own; leave weights and channel order out")
    return _trained(run, file, num_classes)


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 of a module's state: each name, dtype, shape and value, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        array = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _registered(name: str, weights: str | None, num_classes: int | None, channel_order: str | None) -> Source:
    if weights is None:
        module = _random(name, 1000 if num_classes is None else num_classes)
        note = f"random weights: {name} was not trained; give weights for a model that knows anything"
        return _source(name, module, Preprocessing(), note=note)
    loaded = read_weights(weights, channel_order=channel_order)
    if num_classes is None:
        num_classes = loaded.num_classes or 1000
    module = _random(name, num_classes)
    return _source(name, module, load_weights(module, loaded), loaded.labels)


def _trained(run: RunFolder, file: Path, num_classes: int | None) -> Source:
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


def _find_run(source: str | Path) -> tuple[RunFolder, Path]:
    """The run folder and the file of weights in it that `source` means."""
    path = Path(source)
    if path.is_dir():
        run = RunFolder.open(path)
        return run, run.weights_path
    if path.is_file():
        for folder in (path.absolute().parent, path.absolute().parent.parent):
            if RunFolder.stands_at(folder):
                return RunFolder.open(folder), path
        raise EdgeVitError(f"{source}: lies in no run folder; name its model and give the file as weights")
    near = difflib.get_close_matches(str(source), list_models(), n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"models are {', '.join(list_models())}"
    raise EdgeVitError(f"{source}: no model, run folder or checkpoint of that name; {meant}")
