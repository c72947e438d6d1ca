"""`hf:FOLDER_OR_REPOSITORY`: a model of transformers', built by its configuration, filled from safetensors."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError, first_line
from converters.infer import infer_signature
from converters.quiet import quiet
from converters.wrap import flat_outputs
from edgevit.sources.library import cannot_fetch, create, examples_of, fitting_labels, picture_batch, random_note
from edgevit.sources.random_weights import scale_weights
from edgevit.sources.source import RANDOM, Source, weights_sha256

TOKENS = 64  # of text models, or as many as they have positions for
RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
INTERNAL = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
HIDDEN = ("last_hidden_state", "pooler_output")
FILES = ("*.safetensors", "*.json")


class Transformer(nn.Module):
    """A model of transformers' that takes its inputs in order and returns a dict of tensors, without any cache.

    A model with a head returns what the head says, and not also the states that it was given.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.options = options

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        result = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=True, **self.options)
        outputs = {key: value for key, value in result.items() if key not in INTERNAL}
        return flat_outputs({key: value for key, value in outputs.items() if not key.endswith(HIDDEN)} or outputs)


def hugging_face_source(name: str, weights: str | None, num_classes: int | None) -> Source:
    """`name`: a folder with config.json and model.safetensors, or OWNER/NAME on the hub.

    `weights`: None takes those of the folder or repository, "random" needs config.json alone. Takes pictures
    (`pixel_values`) or text (`input_ids`, with `attention_mask` where attention is not causal). Code in the
    repository is never run and pickled weights are never read.
    """
    where = f"hf:{name}"
    if weights not in (None, RANDOM):
        raise EdgeVitError(f"{where}: weights are its own, or {RANDOM}; to use others, put them into a folder")
    if num_classes is not None:
        raise EdgeVitError(f"{where}: its configuration says how many classes it has; leave the number out")
    folder = _folder(name, where, with_weights=weights is None)
    config, model_class = _model_class(folder, where)
    model = _model(where, folder, config, model_class, random=weights == RANDOM)
    inputs = _inputs(where, folder, config, model)
    options = {"use_cache": False} if getattr(config, "use_cache", False) else {}
    module = Transformer(model, tuple(inputs.tensors), options).eval()
    if weights == RANDOM:
        scale_weights(module, tuple(inputs.tensors.values()))
    examples = {key: x[:2] for key, x in inputs.tensors.items()}
    signature = infer_signature(
        module, {key: x[:1] for key, x in examples.items()}, dynamic="input_ids" not in examples
    )
    signature = replace(signature, inputs=tuple(replace(s, meaning=_MEANINGS[s.name]) for s in signature.inputs))
    label = Path(name).expanduser().resolve().name  # "." has a name only so
    notes = [random_note(label)] if weights == RANDOM else []
    return Source(
        module=module,
        name=label,
        signature=signature,
        preprocessing=inputs.preprocessing,
        labels=fitting_labels(_labels(config), signature),
        sha256=weights_sha256(module),
        note="; ".join([*notes, *([inputs.note] if inputs.note else [])]),
        examples=None if inputs.preprocessing else examples_of(signature, examples.values()),
    )


_MEANINGS: dict[str, Any] = {"pixel_values": "image", "input_ids": "tokens", "attention_mask": "mask"}


@dataclass(frozen=True)
class _Inputs:
    """Examples (N, …) of a model's inputs."""

    tensors: dict[str, Tensor]
    preprocessing: Preprocessing | None = None
    note: str = ""


def _folder(name: str, where: str, *, with_weights: bool) -> Path:
    """The folder itself, or that of a repository in the hub's cache."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
            raise EdgeVitError(f"{where}: no such folder; a repository is written hf:OWNER/NAME")
        import huggingface_hub

        try:
            patterns = FILES if with_weights else FILES[1:]
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
        except Exception as error:  # the hub's, httpx's and the system's
            what, remedy = "no such folder, and the repository", "check the name and the network, or give a folder"
            raise cannot_fetch(where, error, what, remedy) from error
    if not (folder / "config.json").is_file():
        raise EdgeVitError(f"{where}: has no config.json, so what model it is cannot be told")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise EdgeVitError(f"{where}: has no model.safetensors; save it so, or take --weights {RANDOM}")
    return folder


def _model_class(folder: Path, where: str) -> tuple[Any, Any]:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # damaged JSON, a kind that this version does not know, code that it would need
        raise EdgeVitError(f"{where}: its config.json cannot be used ({first_line(error)})") from error
    named = (config.architectures or [""])[0]
    with quiet():  # its modules are imported only now, and one of them warns of this torch
        found: Any = getattr(transformers, str(named), None)
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise EdgeVitError(
            f"{where}: config.json must name its architecture, one of transformers'; found {named or 'none'}"
        )
    if getattr(config, "is_encoder_decoder", False) and found.main_input_name != "pixel_values":
        raise EdgeVitError(f"{where}: text in and text out takes two modules; wrap them with python:MODULE:FUNCTION")
    return config, found


def _model(where: str, folder: Path, config: Any, model_class: Any, *, random: bool) -> nn.Module:
    # "eager" is attention in plain operations, which every converter knows.
    if random:
        return create(where, lambda: model_class._from_config(config, attn_implementation="eager"))
    try:
        with quiet():  # a bar for what takes a moment
            return model_class.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                local_files_only=True,
                attn_implementation="eager",
                dtype=torch.float32,
            )
    except Exception as error:  # whatever transformers raises
        raise EdgeVitError(f"{where}: its weights cannot be loaded ({first_line(error)})") from error


def _inputs(where: str, folder: Path, config: Any, model: nn.Module) -> _Inputs:
    main = str(getattr(model, "main_input_name", ""))
    if main == "pixel_values":
        preprocessing, note = _preprocessing(folder, config)
        return _Inputs({"pixel_values": picture_batch(preprocessing)}, preprocessing, note)
    if main != "input_ids":
        raise EdgeVitError(f"{where}: takes {main or 'nothing known'}; only pictures and text are taken from here")
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise EdgeVitError(f"{where}: its config.json says no vocab_size, so its tokens are unknown; write it there")
    positions = getattr(config, "max_position_embeddings", None) or TOKENS
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (4, min(TOKENS, positions)), generator=generator)
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return _Inputs({"input_ids": tokens})
    return _Inputs({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def _preprocessing(folder: Path, config: Any) -> tuple[Preprocessing, str]:
    """From preprocessor_config.json, else plain pictures at the configuration's size; and what it cannot say."""
    path = folder / "preprocessor_config.json"
    size = getattr(config, "image_size", None)
    if not path.is_file():
        try:
            plain = Preprocessing(size=_written(size or 224))
        except ValueError as error:
            raise EdgeVitError(f"{folder / 'config.json'}: image_size is {error}; write one number, or two") from error
        return plain, "no preprocessor_config.json: values are divided by 255 alone"
    try:
        return _from_processor(json.loads(path.read_text(encoding="utf-8")), size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EdgeVitError(f"{path}: damaged, or of an unknown kind ({error!r})") from error


def _from_processor(data: dict[str, Any], fixed: Any) -> tuple[Preprocessing, str]:
    """What an image processor does, in our terms; `fixed`: the size that the model's configuration names, or None."""
    size: Any = data.get("size") or fixed or 224
    note = ""
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size if isinstance(size, int) else None
    crop = data.get("crop_size") if data.get("do_center_crop", "crop_size" in data) else None
    if shortest is None:  # height and width: pictures are squashed to them
        target, fraction = (size["height"], size["width"]), 1.0
        note = "its processor squashes a picture to the size, here the centre is cut out"
    elif crop is not None:
        target = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
        fraction = min(target) / shortest
    else:
        target, fraction = (shortest, shortest), float(data.get("crop_pct") or 1.0)
    normalise = data.get("do_normalize", "image_mean" in data)
    return (
        Preprocessing(
            size=_written(target),
            crop_fraction=min(1.0, fraction),
            interpolation=RESAMPLING.get(data.get("resample", 2), "bilinear"),
            channel_order="BGR" if data.get("do_flip_channel_order") else "RGB",
            scale=float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 1.0,
            mean=tuple(map(float, data["image_mean"])) if normalise else (0.0, 0.0, 0.0),
            std=tuple(map(float, data["image_std"])) if normalise else (1.0, 1.0, 1.0),
        ),
        note,
    )


def _written(size: Any) -> str:
    """Of a number, (height, width) or (channels, height, width). Raises ValueError, with `size`, for another thing."""
    sides = [size, size] if isinstance(size, int) else list(size)[-2:] if isinstance(size, list | tuple) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(repr(size)[:60])
    height, width = sides
    return str(height) if height == width else f"{height}x{width}"


def _labels(config: Any) -> tuple[str, ...]:
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    labels = tuple(names[number] for number in sorted(names))
    return () if all(re.fullmatch(r"LABEL_\d+", label) for label in labels) else labels
