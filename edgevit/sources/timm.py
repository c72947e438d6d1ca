"""`timm:NAME`: a classifier of timm's, with its own weights and the preprocessing that they were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from edgevit.models.pretrained import read_tensors
from edgevit.sources.library import cannot_fetch, classifier_source, create, load_file, unknown_name
from edgevit.sources.source import RANDOM, Source

MEANT_FOR = 224  # where a configuration names no size


def timm_source(name: str, weights: str | None, num_classes: int | None) -> Source:
    """`name` as in `timm.list_models()`, with or without the tag of its weights: `resnet18`, `resnet18.a1_in1k`.

    `weights`: None fetches timm's own (or finds them in its cache), "random", or a file of timm's weights.
    """
    import timm

    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models():
        raise unknown_name("timm", architecture, timm.list_models())
    if tag and name not in timm.list_pretrained(f"{architecture}.*"):
        raise unknown_name("timm", name, timm.list_pretrained(f"{architecture}.*"))
    config = timm.get_pretrained_cfg(name).to_dict()
    preprocessing = timm_preprocessing(config)
    if weights is None:
        if num_classes not in (None, config.get("num_classes")):
            raise EdgeVitError(f"timm:{name}: its weights have {config.get('num_classes')} classes, not {num_classes}")
        try:
            # Fetched here, since timm's own way tries again for half a minute where there is no network.
            file = _hub_file(config)
            overlay = {"file": file, "custom_load": False} if file else None
            module = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
        except Exception as error:  # of several libraries: the hub's, urllib's, timm's own
            raise cannot_fetch(f"timm:{name}", error) from error
        return classifier_source(module, name, preprocessing, _labels(config), random=False)
    if weights == RANDOM:
        classes = num_classes or config.get("num_classes") or 1000
        module = create(f"timm:{name}", lambda: timm.create_model(architecture, num_classes=classes))
        return classifier_source(module, architecture, preprocessing, (), random=True)
    path = Path(weights).expanduser()
    classes = num_classes or (_classes(config, path) if path.is_file() else None) or config.get("num_classes") or 1000
    module = create(f"timm:{name}", lambda: timm.create_model(architecture, num_classes=classes))
    load_file(module, f"timm:{name}", path)
    return classifier_source(
        module, architecture, preprocessing, _labels(config | {"num_classes": classes}), random=False
    )


def timm_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """From a `pretrained_cfg`."""
    _, height, width = config.get("input_size") or (3, MEANT_FOR, MEANT_FOR)
    interpolation = str(config.get("interpolation") or "bicubic")
    return Preprocessing(
        size=str(height) if height == width else f"{height}x{width}",
        crop_fraction=float(config.get("crop_pct") or 0.875),
        interpolation=interpolation if interpolation in ("bilinear", "bicubic", "nearest") else "bicubic",
        mean=tuple(map(float, config.get("mean") or (0.485, 0.456, 0.406))),
        std=tuple(map(float, config.get("std") or (0.229, 0.224, 0.225))),
    )


def _hub_file(config: Mapping[str, Any]) -> str | None:
    """The safetensors of a configuration's repository, in the hub's cache; None where it names no repository."""
    import huggingface_hub

    repository = config.get("hf_hub_id")
    if not repository:
        return None
    wanted = config.get("hf_hub_filename") or "model.safetensors"
    folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=[wanted]))
    return str(folder / wanted) if (folder / wanted).is_file() else None


def _classes(config: Mapping[str, Any], file: Path) -> int | None:
    """How many classes a file of weights has, by the name of the classifier in the configuration."""
    classifier = config.get("classifier")
    name = classifier if isinstance(classifier, str) else (classifier or ("",))[0]
    weight = read_tensors(file).get(f"{name}.weight")
    return None if weight is None else len(weight)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names of ImageNet's subsets, which timm knows by their number of classes."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(dict(config))
    if subset is None:
        return ()
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))
