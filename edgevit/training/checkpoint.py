"""A training's state in one safetensors file: tensors by name, the rest as JSON in its header. Executes nothing.

One file, because a file can be replaced in one step and a folder cannot: whenever the machine stops, either the last
checkpoint or the one before is there, whole. No random generator is kept: every draw is keyed by the seed, the epoch
and the step (see `loop.seed_step`), so that the step says it all.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from converters.artifact import written_beside
from converters.errors import EdgeVitError, first_line

FILE = "last.safetensors"
VERSION = "1"


@dataclass
class Position:
    """How far a training has come: whole epochs, batches of the current one, steps in all.

    `lr` is the last step's. `cpu_seconds` counts from the training's beginning; `seconds`, and the loss's sum over the
    `images` that one process has seen, from the current epoch's.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    lr: float = 0.0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    loss_sum: float = 0.0
    images: int = 0


def save_weights(module: nn.Module, path: Path) -> None:
    """`module`'s parameters and buffers, under its own names. Whole or not at all."""
    _write(path, module.state_dict(), {"format": "pt"})


def save_state(
    folder: Path,
    position: Position,
    *,
    module: nn.Module,
    average: nn.Module,
    optimizer: Optimizer,
    sampler: dict[str, Any],
    scaler: dict[str, Any] | None = None,
) -> None:
    """Everything that `load_state` needs to go on exactly here. Whole or not at all."""
    tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{slot}": value for slot, value in slots.items()}
    about = {"position": asdict(position), "sampler": sampler, "scaler": scaler}
    _write(folder / FILE, tensors, {"edgevit_state": VERSION, "about": json.dumps(about)})


def load_state(
    folder: Path, *, module: nn.Module, average: nn.Module, optimizer: Optimizer
) -> tuple[Position, dict[str, Any], dict[str, Any] | None]:
    """Fills the three in place; returns where the training stood, the sampler's state and the gradient scaler's.

    Raises EdgeVitError when there is no checkpoint, or it is damaged or another model's.
    """
    path = folder / FILE
    if not path.is_file():
        raise EdgeVitError(f"{path}: no checkpoint to resume from; start anew with another --out")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if header.get("edgevit_state") != VERSION:
            raise EdgeVitError(f"{path}: not a training state of this version; start anew with another --out")
        about = json.loads(header["about"])
        module.load_state_dict(_part(tensors, "model."))
        average.load_state_dict(_part(tensors, "average."))
        _load_optimizer(optimizer, _part(tensors, "optimizer."))
        return Position(**about["position"]), about["sampler"], about["scaler"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise EdgeVitError(
            f"{path}: cannot be resumed from ({first_line(error)}); start anew with another --out"
        ) from error


def _load_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, tensor in tensors.items():
        index, slot = name.split(".")
        parameter = parameters[int(index)]
        if tensor.shape == parameter.shape:  # in the parameter's memory order, which fused kernels take for granted
            tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        state.setdefault(int(index), {})[slot] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # Copies on the CPU, each with storage of its own in plain order: safetensors takes nothing else.
    dense = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with written_beside(path) as draft:
        try:
            save_file(dense, draft, metadata=metadata)
        except SafetensorError as error:  # what it makes of a full disk
            raise EdgeVitError(f"{path}: cannot write it ({error})") from error
