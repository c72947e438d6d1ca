"""What can be exported or evaluated: any model that can be named, with or without weights, or what a run left."""

from __future__ import annotations

import difflib
from pathlib import Path

from converters.errors import EdgeVitError
from edgevit.models.registry import list_models
from edgevit.sources.function import function_source
from edgevit.sources.hugging_face import hugging_face_source
from edgevit.sources.registered import find_run, registered_source, trained_source
from edgevit.sources.source import RANDOM, Source, weights_sha256
from edgevit.sources.timm import timm_source
from edgevit.sources.torchvision import torchvision_source

__all__ = ["RANDOM", "Source", "load_source", "weights_sha256"]

LIBRARIES = {"timm": timm_source, "torchvision": torchvision_source, "hf": hugging_face_source}


def load_source(
    source: str | Path, *, weights: str | None = None, num_classes: int | None = None, channel_order: str | None = None
) -> Source:
    """A model by what a user writes:

    - a registered model's name. It takes `weights` (a file, a folder or `hf:OWNER/NAME`; `channel_order` as in
      `edgevit.models.pretrained.load_weights`) and as many classes as they have; without, random ones;
    - a run folder, or a checkpoint file inside one: with its own weights, classes and preprocessing;
    - `timm:NAME`, `torchvision:NAME` or `hf:FOLDER_OR_REPOSITORY`: with the library's own weights and preprocessing,
      with a file of `weights`, or with `weights` "random";
    - `python:MODULE:FUNCTION`, a function that returns a module and example inputs (see `function_source`).

    Random weights are the same every time, and `note` says that they are random; `num_classes` is for them. Nothing
    that a file of weights or a repository holds is executed.

    Raises EdgeVitError for anything else, naming what is nearest, and for weights that do not fit or cannot be had.
    """
    text = str(source)
    if text in list_models():
        return registered_source(text, weights, num_classes, channel_order)
    kind, _, name = text.partition(":")
    if kind in LIBRARIES and name:
        _refuse(text, channel_order=channel_order)
        return LIBRARIES[kind](name, weights, num_classes)
    if kind == "python" and name:
        _refuse(text, weights=weights, num_classes=num_classes, channel_order=channel_order)
        return function_source(name)
    found = find_run(source)
    if found is None:
        raise EdgeVitError(_unknown(text))
    if weights is not None or channel_order is not None:
        raise EdgeVitError(f"{source}: a run has weights of its own; leave weights and channel order out")
    return trained_source(*found, num_classes)


def _refuse(source: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise EdgeVitError(f"{source}: takes no {name.replace('_', ' ')}; leave it out")


def _unknown(source: str) -> str:
    near = difflib.get_close_matches(source, list_models(), n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"models are {', '.join(list_models())}"
    others = "" if near else ", and timm:NAME, torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION"
    return f"{source}: no model, run folder or checkpoint of that name; {meant}{others}"
