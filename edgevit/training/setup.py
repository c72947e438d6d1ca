"""What a training is made of: everything that stands before the first step, fresh or as a checkpoint left it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from converters.artifact import Preprocessing, written_beside
from converters.errors import EdgeVitError
from converters.signature import Signature
from edgevit.data.images import ImageDataset, ImageSet, load_images
from edgevit.data.multi_scale import MultiScaleBatchSampler
from edgevit.models.pretrained import load_weights, read_weights
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.training.checkpoint import Position, load_state, save_state, save_weights
from edgevit.training.config import TrainConfig


@dataclass
class Training:
    """`network` and `optimizer` are accelerate's wrappers around `model` and its AdamW; `average` holds the averaged
    weights; `position` says how far it has come."""

    config: TrainConfig
    run: RunFolder
    accelerator: Accelerator
    held_out: ImageSet
    preprocessing: Preprocessing
    dataset: ImageDataset
    sampler: MultiScaleBatchSampler
    loader: DataLoader
    model: nn.Module
    network: nn.Module
    average: AveragedModel
    optimizer: Optimizer
    position: Position

    def save(self) -> None:
        """Averaged weights for whoever uses the run, and the state for `--resume`; by the main process alone."""
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            save_weights(self.average.module, self.run.weights_path)
            save_state(
                self.run.state,
                self.position,
                module=self.model,
                average=self.average,
                optimizer=self.optimizer,
                sampler=self.sampler.state_dict(),
                scaler=scaler.state_dict() if scaler else None,
            )
        self.accelerator.wait_for_everyone()


def set_up(config: TrainConfig, out: Path, *, resume: bool) -> Training:
    """Checks every option before it writes anything. Raises EdgeVitError; see `loop.train`."""
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    accelerator = _accelerator(config.precision)
    images, held_out = load_images(config.data, "train"), load_images(config.data, "test")
    signature = Signature.image_classifier(len(images.classes))
    for size in (*config.sizes, config.base_size):
        signature.check(size)
    torch.manual_seed(config.seed)
    model, preprocessing = _model(config, len(images.classes))
    sampler = MultiScaleBatchSampler(
        len(images),
        config.sizes,
        base_size=config.base_size,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    augment = images.augment if config.augment == "auto" else config.augment
    dataset = ImageDataset(images, preprocessing, augment=augment, seed=config.seed)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=config.workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator().manual_seed(config.seed),  # its own, so that it draws from no global one
    )
    model = model.to(accelerator.device).to(memory_format=torch.channels_last)
    average = AveragedModel(model, use_buffers=True)
    adamw = AdamW(parameter_groups(model, config.weight_decay), lr=config.lr, fused=True)

    run = _run_folder(config, out, resume, accelerator, images, preprocessing)
    position = Position()
    if resume:
        position, sampler_state, scaler_state = load_state(run.state, module=model, average=average, optimizer=adamw)
        sampler.load_state_dict(sampler_state)
        if scaler_state and accelerator.scaler:
            accelerator.scaler.load_state_dict(scaler_state)
        if accelerator.is_main_process:
            _forget_unfinished_epochs(run, position)
    # The loader is not handed over: accelerate would deal batches out to the processes that the sampler has dealt.
    network, optimizer = accelerator.prepare(model, adamw)
    return Training(
        config, run, accelerator, held_out, preprocessing, dataset, sampler, loader, model, network, average, optimizer,
        position,
    )  # fmt: skip


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weights with decay; biases and the scales of normalisations, all of one dimension, without."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _accelerator(precision: str) -> Accelerator:
    # accelerate keeps a precision for the life of the process, and refuses a second training that wants another.
    AcceleratorState._reset_state()
    try:
        return Accelerator(mixed_precision=precision)
    except ValueError as error:
        raise EdgeVitError(f"--precision {precision}: {str(error).splitlines()[0]}") from error


def _model(config: TrainConfig, num_classes: int) -> tuple[nn.Module, Preprocessing]:
    options = {} if config.dropout is None else {"dropout": config.dropout}
    model = create_model(config.model, num_classes, **options)
    if config.init is None:
        return model, Preprocessing(size=str(config.base_size))
    weights = read_weights(config.init)
    preprocessing = load_weights(model, weights, new_head=weights.num_classes != num_classes)
    return model, replace(preprocessing, size=str(config.base_size))


def _run_folder(
    config: TrainConfig,
    out: Path,
    resume: bool,
    accelerator: Accelerator,
    images: ImageSet,
    preprocessing: Preprocessing,
) -> RunFolder:
    if resume:
        run = RunFolder.open(out)
        config.check_resumes(TrainConfig.from_toml(run.config))
        if run.config.get("data_sha256") != images.sha256:
            raise EdgeVitError(f"cannot resume: the images of {config.data} are others than those of {out}")
        return run
    if RunFolder.stands_at(out):
        raise EdgeVitError(f"{out}: holds a run already; go on with --resume, or give another --out")
    accelerator.wait_for_everyone()  # nobody creates it before everybody has looked
    if accelerator.is_main_process:
        about = {
            "num_classes": len(images.classes),
            "classes": list(images.classes),
            "data_sha256": images.sha256,
            "processes": accelerator.num_processes,
            "preprocessing": asdict(preprocessing),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        RunFolder.create(out, config.to_toml() | about)
    accelerator.wait_for_everyone()
    return RunFolder.open(out)


def _forget_unfinished_epochs(run: RunFolder, position: Position) -> None:
    """A line may have been written just before its checkpoint was not; that epoch is gone through again."""
    kept = [line for line in run.metrics() if line["epoch"] <= position.epoch]
    with written_beside(run.metrics_path) as draft:
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
