"""`torchvision:NAME`: a classifier of torchvision's, with its weights and the transforms that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from edgevit.models.pretrained import read_tensors
from edgevit.sources.library import cannot_fetch, classifier_source, create, load_file, unknown_name
from edgevit.sources.source import RANDOM, Source


def torchvision_source(name: str, weights: str | None, num_classes: int | None) -> Source:
    """`name` as in `torchvision.models.list_models(torchvision.models)`.

    `weights`: None fetches the library's best ones (or finds them in its cache), "random", or a file.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise unknown_name("torchvision", name, known)
    best = models.get_model_weights(name).DEFAULT
    preprocessing = _preprocessing(best.transforms())
    labels = tuple(best.meta["categories"])
    if weights is None and num_classes not in (None, len(labels)):
        raise EdgeVitError(f"torchvision:{name}: its weights have {len(labels)} classes, not {num_classes}")
    file = Path(weights).expanduser() if weights not in (None, RANDOM) else None
    classes = num_classes or (_classes(file) if file and file.is_file() else None) or len(labels)
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):  # as their weights want them; every weight is replaced anyway
        options |= {"transform_input": True, "aux_logits": weights != RANDOM, "init_weights": False}
    module = create(f"torchvision:{name}", lambda: models.get_model(name, weights=None, **options))
    if file is not None:
        load_file(module, f"torchvision:{name}", file)
    elif weights is None:
        try:
            state = torch.hub.load_state_dict_from_url(best.url, progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise cannot_fetch(f"torchvision:{name}", error) from error
        module.load_state_dict(state)
    return classifier_source(module, name, preprocessing, labels, random=weights == RANDOM)


def _preprocessing(transforms: Any) -> Preprocessing:
    """From the transforms of a `Weights`: the shorter side to `resize_size`, then the centre `crop_size`."""
    crop, resize = transforms.crop_size[0], transforms.resize_size[0]
    return Preprocessing(
        size=str(crop),
        crop_fraction=crop / resize,
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )


def _classes(file: Path) -> int | None:
    """How many classes a file of weights has: the length of its last weights."""
    weights = [tensor for key, tensor in read_tensors(file).items() if key.endswith("weight")]
    return len(weights[-1]) if weights else None
