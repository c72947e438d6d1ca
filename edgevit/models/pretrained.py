"""Weights from timm, Hugging Face, CVNets or edgevit itself, with the preprocessing that they were trained with."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError, first_line
from edgevit.models.mobilevit_weights import CLASSIFIER, HUGGING_FACE, LAYOUTS, OWN, STEM, TIMM, Layout
from edgevit.models.registry import create_model, list_models
from edgevit.run_folder import RunFolder

FILE_NAMES = ("model.safetensors", "pytorch_model.bin")  # in a folder or a hub repository, the first that is there
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# A training checkpoint keeps its weights under one of these; the averaged ones are those to use.
WRAPPERS = ("ema_state_dict", "state_dict_ema", "model_state_dict", "state_dict", "model")
RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, in preprocessor_config.json


@dataclass(frozen=True)
class Weights:
    """Tensors under our names, for pictures in RGB order, and what their folder says of them."""

    origin: str  # where they came from, for messages
    layout: str  # "timm", "Hugging Face", "CVNets" or "edgevit"
    state: Mapping[str, Tensor]
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int | None:
        """None when there is no classifier among them."""
        return len(self.state[CLASSIFIER[0]]) if CLASSIFIER[0] in self.state else None


def load_weights(
    model: nn.Module, source: str | Path | Weights, *, channel_order: str | None = None, new_head: bool = False
) -> Preprocessing:
    """Copies weights into `model` in place and returns the preprocessing they were trained with.

    `source` is a file (.safetensors, or .pt, .pth, .bin that hold nothing but tensors), a folder as timm's and
    Hugging Face's hub repositories are laid out, a run folder, `"hf:OWNER/NAME"`, or what `read_weights` returned.
    The model always takes RGB: weights that were trained on BGR pictures get the input channels of their first
    convolution turned round. `channel_order` ("RGB" or "BGR") says what they were trained on where the default for
    their library (timm RGB; Hugging Face as its configuration says, else BGR; CVNets BGR) is wrong: CVNets 0.2 and
    later train on RGB. `new_head` leaves the model's own classifier as it is, for another set of classes.

    Raises EdgeVitError, leaving `model` untouched, when the source cannot be read, has unknown names, or belongs to
    another model or number of classes.
    """
    weights = source if isinstance(source, Weights) else read_weights(source, channel_order=channel_order)
    wanted = model.state_dict()
    state = dict(weights.state)
    if new_head:
        state |= {key: wanted[key] for key in CLASSIFIER}
    for key, tensor in wanted.items():  # training's counter of batches, which some files leave out, changes no output
        if key.endswith("num_batches_tracked"):
            state.setdefault(key, tensor)
    if problem := _mismatch(weights, state, wanted):
        raise EdgeVitError(f"{weights.origin}: {problem}")
    model.load_state_dict(state)
    return weights.preprocessing


def read_weights(source: str | Path, *, channel_order: str | None = None) -> Weights:
    """Reads weights without a model to put them into; arguments and errors as in `load_weights`."""
    if channel_order not in (None, "RGB", "BGR"):
        raise EdgeVitError(f"channel order '{channel_order}': write RGB or BGR")
    origin = str(source)
    path = _download(origin.removeprefix("hf:")) if origin.startswith("hf:") else Path(source).expanduser()
    file = _weights_file(path, origin)
    state = read_tensors(file)
    layout = next((layout for layout in LAYOUTS if layout.recognises(state)), None)
    if layout is None:
        raise EdgeVitError(
            f"{origin}: not MobileViT weights of timm, Hugging Face, CVNets or edgevit; "
            f"its names begin {', '.join(sorted(state)[:3]) or 'nowhere: it is empty'}"
        )
    state = layout.rename(state)
    preprocessing, order, labels = _described(layout, file.parent)
    if STEM in state and (channel_order or order) == "BGR":
        state[STEM] = state[STEM].flip(1)
    return Weights(origin, layout.name, state, preprocessing, labels)


def _mismatch(weights: Weights, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """One line on why `state` does not go into a model whose state is `wanted`; None when it does."""

    def differences(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> list[str]:
        return [key for key in theirs.keys() | ours.keys() if _shape(theirs, key) != _shape(ours, key)]

    different = sorted(differences(state, wanted))
    if not different:
        return None
    if set(different) <= set(CLASSIFIER):
        has = f"{weights.num_classes} classes" if weights.num_classes else "no classifier"
        fix = f"num_classes={weights.num_classes} or " if weights.num_classes else ""
        return f"has {has}, the model {len(wanted[CLASSIFIER[0]])}; give {fix}new_head=True"
    names = {}
    for name in list_models():
        with torch.device("meta"):
            reference = create_model(name).state_dict()
        for role, candidate in (("found", weights.state), ("model", wanted)):
            keys = [key for key in differences(candidate, reference) if not key.endswith("num_batches_tracked")]
            if set(keys) <= set(CLASSIFIER):
                names[role] = name
    example = different[0]
    found, ours = _shape(state, example) or "absent", _shape(wanted, example) or "absent"
    return (
        f"these are {weights.layout} weights of {names.get('found', 'an unknown variant')}, the model is "
        f"{names.get('model', 'another one')}; for example {example}: {found} here, {ours} there"
    )


def _shape(state: Mapping[str, Tensor], key: str) -> tuple[int, ...] | None:
    return tuple(state[key].shape) if key in state else None


def _download(repository: str) -> Path:
    """The folder of a hub repository's weights and configurations, in huggingface_hub's own cache."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        files = huggingface_hub.snapshot_download(repository, allow_patterns=[*FILE_NAMES, "*config.json"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EdgeVitError(
            f"hf:{repository}: cannot be fetched ({first_line(error)}); "
            "check the name and the network, or give a folder"
        ) from error
    return Path(files)


def _weights_file(path: Path, origin: str) -> Path:
    """The file itself, or the one that holds the weights in a folder."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise EdgeVitError(f"{origin}: no such file or folder; weights from the hub are written hf:OWNER/NAME")
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if len(files) != 1:
        found = f"several: {', '.join(file.name for file in files)}" if files else "none"
        raise EdgeVitError(f"{origin}: a folder should hold one file of weights ({', '.join(SUFFIXES)}); found {found}")
    return files[0]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, or from .pt, .pth, .bin that hold nothing else; executes nothing in them."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise EdgeVitError(
            f"{file}: holds more than tensors, which is not read for safety; save its state_dict alone"
        ) from error
    except (safetensors.SafetensorError, RuntimeError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise EdgeVitError(f"{file}: cannot be read as weights ({first_line(error)})") from error
    for name in WRAPPERS:
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            data = data[name]
    if not isinstance(data, Mapping):
        raise EdgeVitError(f"{file}: holds no state_dict; save model.state_dict() in it")
    return {str(key).removeprefix("module."): value for key, value in data.items() if isinstance(value, Tensor)}


def _described(layout: Layout, folder: Path) -> tuple[Preprocessing, str, tuple[str, ...]]:
    """Preprocessing, order of channels and labels: the layout's published ones, but for what `folder` says itself."""
    if layout is OWN and RunFolder.stands_at(folder):
        run = RunFolder.open(folder)
        return run.preprocessing, layout.channel_order, run.classes
    config, processor = _read_json(folder / "config.json"), _read_json(folder / "preprocessor_config.json")
    try:
        if layout is TIMM:
            return _timm_preprocessing(config.get("pretrained_cfg", config)), layout.channel_order, ()
        if layout is HUGGING_FACE:
            preprocessing, order = _hugging_face_preprocessing(processor) if processor else (None, None)
            names = {int(number): str(name) for number, name in config.get("id2label", {}).items()}
            labels = tuple(names[number] for number in sorted(names))
            if all(
                re.fullmatch(r"LABEL_\d+", label) for label in labels
            ):  # their filler where nobody named the classes
                labels = ()
            return preprocessing or layout.preprocessing, order or layout.channel_order, labels
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise EdgeVitError(f"{folder}: its configuration is damaged or of an unknown kind ({error!r})") from error
    return layout.preprocessing, layout.channel_order, ()


def _timm_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """From timm's `pretrained_cfg`; what it does not say is as in timm's published MobileViT weights."""
    known = TIMM.preprocessing
    height, width = config.get("input_size", (3, 256, 256))[1:]
    return replace(
        known,
        size=str(height) if height == width else f"{height}x{width}",
        crop_fraction=float(config.get("crop_pct") or known.crop_fraction),
        interpolation=str(config.get("interpolation", known.interpolation)),
        mean=tuple(map(float, config.get("mean", known.mean))),
        std=tuple(map(float, config.get("std", known.std))),
    )


def _hugging_face_preprocessing(config: Mapping[str, Any]) -> tuple[Preprocessing, str]:
    """From preprocessor_config.json. What it leaves out is as in their processor, which never applies mean and std."""
    size, crop = config.get("size", {"shortest_edge": 224}), config.get("crop_size", {"height": 256, "width": 256})
    shorter = size["shortest_edge"] if isinstance(size, Mapping) else size
    height, width = (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)
    if not config.get("do_center_crop", True):
        height = width = shorter
    scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0
    preprocessing = Preprocessing(
        size=str(height) if height == width else f"{height}x{width}",
        crop_fraction=min(height, width) / shorter,
        interpolation=RESAMPLING[config.get("resample", 3)],
        scale=scale,
    )
    return preprocessing, "BGR" if config.get("do_flip_channel_order", True) else "RGB"


def _read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file. Raises EdgeVitError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EdgeVitError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise EdgeVitError(f"{path}: should hold a JSON object")
    return data
