"""What the sources from libraries share: a picture classifier or other model, its weights, and what is said of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError, first_line
from converters.infer import infer_signature
from converters.signature import Signature, Size
from edgevit.data.pictures import picture_set, stack
from edgevit.models.pretrained import read_tensors
from edgevit.sources.random_weights import scale_weights
from edgevit.sources.source import RANDOM, Source, weights_sha256

PICTURES = 8  # that random weights are fitted to


def classifier_source(
    module: nn.Module, name: str, preprocessing: Preprocessing, labels: tuple[str, ...], *, random: bool
) -> Source:
    """A classifier of pictures: its input is called `image`, its output `logits`."""
    pictures = picture_batch(preprocessing)
    if random:
        scale_weights(module, (pictures,))
    signature = infer_signature(module, pictures[:1])
    image = replace(signature.inputs[0], name="image", meaning="image")
    return Source(
        module=module.eval(),
        name=name,
        signature=replace(signature, inputs=(image,)),
        preprocessing=preprocessing,
        labels=fitting_labels(labels, signature) if not random else (),
        sha256=weights_sha256(module),
        note=random_note(name) if random else "",
    )


def picture_batch(preprocessing: Preprocessing, count: int = PICTURES) -> Tensor:
    """Photographs as (N, 3, H, W) float32, at the preprocessing's own size."""
    return torch.from_numpy(stack(picture_set(count), preprocessing, Size.parse(preprocessing.size)))


def fitting_labels(labels: tuple[str, ...], signature: Signature) -> tuple[str, ...]:
    """`labels` where there is one for each class."""
    logits = next((spec for spec in signature.outputs if spec.meaning == "logits"), None)
    return labels if logits and logits.shape[-1] == len(labels) else ()


def random_note(name: str) -> str:
    return f"random weights: {name} as it stands knows nothing; its speed and its export are what can be tried"


def create(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes with random weights, the same every time; the global generator stays as it was."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()
    except Exception as error:  # whatever a library raises
        raise EdgeVitError(f"{name}: cannot be built ({first_line(error)})") from error


def load_file(module: nn.Module, name: str, file: str | Path) -> None:
    """Copies a file of weights (.safetensors, .pt, .pth, .bin; nothing in it is executed) into `module`."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise EdgeVitError(f"{file}: no such file of weights; write a file, or {RANDOM}")
    fill(module, name, read_tensors(path), str(file))


def fill(module: nn.Module, name: str, state: Mapping[str, Tensor], origin: str) -> None:
    """Copies tensors by name. Raises EdgeVitError with the first one that is missing, left over or of another shape."""
    wanted = module.state_dict()
    for key in sorted(wanted.keys() | state.keys()):
        found, ours = (tuple(tensors[key].shape) if key in tensors else "absent" for tensors in (state, wanted))
        if found != ours and not key.endswith("num_batches_tracked"):
            raise EdgeVitError(f"{origin}: not weights of {name}; for example {key}: {found} here, {ours} there")
    module.load_state_dict(dict(state), strict=False)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> EdgeVitError:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"it has {len(names)}, such as {', '.join(names[:3])}"
    return EdgeVitError(f"{kind}:{name}: {kind} has no model of that name; {advice}")


def cannot_fetch(
    source: str,
    error: BaseException,
    what: str = "its weights",
    remedy: str = f"check the network, give a file as weights, or take random ones with --weights {RANDOM}",
) -> EdgeVitError:
    return EdgeVitError(f"{source}: {what} cannot be fetched ({first_line(error)[:160]}); {remedy}")


def examples_of(signature: Signature, inputs: Iterable[Tensor]) -> dict[str, np.ndarray]:
    """Example tensors as arrays, by the signature's names."""
    return {spec.name: x.detach().cpu().numpy() for spec, x in zip(signature.inputs, inputs, strict=True)}
