"""The training loop, to be read from top to bottom: multi-scale batches, AdamW, averaged weights, exact resuming."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from converters.errors import EdgeVitError
from edgevit.evaluation import evaluate_module
from edgevit.run_folder import RunFolder
from edgevit.training.checkpoint import Position
from edgevit.training.config import TrainConfig
from edgevit.training.schedule import ema_decay, learning_rate
from edgevit.training.setup import Training, set_up
from edgevit.training.signals import Interrupted, StopWish
from edgevit.training.tasks import classification

EVALUATION_LIMIT = 2000  # held-out images that an evaluation during training looks at; `edgevit evaluate` takes all


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    resume: bool = False,
    on_step: Callable[[Position, float], None] = lambda position, fraction: None,
    on_epoch: Callable[[dict[str, Any]], None] = lambda line: None,
) -> RunFolder:
    """Trains a classifier into the run folder `out`; its model.safetensors holds the averaged weights.

    `resume` goes on from the last checkpoint, on a CPU bit for bit as if nothing had happened. `on_step` is told the
    position and how much of the training is over (0 to 1); `on_epoch` the line that went into metrics.jsonl.
    Under `accelerate launch` it runs in several processes, of which the first alone writes and calls these two.

    Raises EdgeVitError for wrong options, for a folder that holds a run already (or, with `resume`, holds none), and
    Interrupted, once everything is saved, after SIGINT or SIGTERM.
    """
    training = set_up(config, Path(out), resume=resume)
    accelerator, position, sampler = training.accelerator, training.position, training.sampler
    cpu_before = time.process_time() - position.cpu_seconds
    saved_at = time.monotonic()
    fraction = fraction_done(config, position, len(sampler))

    with _nothing_left_of_a_false_start(training), StopWish() as stop:
        while fraction < 1:
            began = time.monotonic() - position.seconds
            loss_sum = torch.tensor(position.loss_sum, device=accelerator.device)
            sampler.set_epoch(position.epoch)
            training.dataset.set_epoch(position.epoch)
            training.network.train()

            for images, labels in _first_hand(training.loader):
                position.lr = learning_rate(
                    position.step,
                    fraction,
                    lr=config.lr,
                    warmup_lr=config.warmup_lr,
                    min_lr=config.min_lr,
                    warmup_steps=config.warmup_steps,
                )
                loss_sum += train_step(training, images, labels)
                sampler.consumed()
                position.batch += 1
                position.step += 1
                position.images += len(labels)
                position.cpu_seconds, save_due, stop_due = _agree(
                    accelerator,
                    time.process_time() - cpu_before,
                    time.monotonic() - saved_at > 60 * config.checkpoint_minutes,
                    stop.wished,
                )
                fraction = fraction_done(config, position, len(sampler))
                if accelerator.is_main_process:
                    on_step(position, fraction)
                if save_due or stop_due:
                    position.loss_sum, position.seconds = loss_sum.item(), time.monotonic() - began
                    training.save()
                    saved_at = time.monotonic()
                if stop_due:
                    raise Interrupted(f"stopped after step {position.step}, saved in {training.run.path}")
                if fraction >= 1:
                    break

            line = _finish_epoch(training, loss_sum, time.monotonic() - began, last=fraction >= 1)
            training.save()
            saved_at = time.monotonic()
            if accelerator.is_main_process:
                on_epoch(line)
    return training.run


@contextlib.contextmanager
def _nothing_left_of_a_false_start(training: Training) -> Iterator[None]:
    """Wrong input that shows before anything is saved, such as an unreadable picture, leaves no run folder behind."""
    try:
        yield
    except EdgeVitError:
        if training.accelerator.is_main_process and not training.run.weights_path.exists():
            training.run.discard()
        raise


def _first_hand(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches; an error of ours comes as the worker raised it, without torch's traceback in it."""
    try:
        yield from loader
    except EdgeVitError as error:
        _, wrapped, message = str(error).rstrip().rpartition(f"{EdgeVitError.__name__}: ")
        raise EdgeVitError(message) if wrapped else error from None


def train_step(training: Training, images: Tensor, labels: Tensor) -> Tensor:
    """One step of the optimiser and of the average, at the position's learning rate.

    Takes images (N, 3, H, W) and labels (N,); returns N times the mean loss, a detached scalar on the device.
    """
    config, position, accelerator = training.config, training.position, training.accelerator
    seed_step(config.seed, position.step, accelerator.process_index)
    for group in training.optimizer.param_groups:
        group["lr"] = position.lr
    images = images.to(accelerator.device, memory_format=torch.channels_last, non_blocking=True)
    labels = labels.to(accelerator.device, non_blocking=True)
    loss = classification.loss(training.network(images), labels, config.label_smoothing)
    accelerator.backward(loss)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.average.multi_avg_fn = get_ema_multi_avg_fn(ema_decay(position.step, config.ema_decay))
    training.average.update_parameters(training.model)
    return loss.detach() * len(labels)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes what a step draws (dropout) a function of these three, so that a resumed training draws the same."""
    key = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(key >> np.uint64(1)))


def fraction_done(config: TrainConfig, position: Position, steps_in_epoch: int) -> float:
    """How much of the training is over, from 0 to 1, by whichever of its limits is the nearest."""
    fractions = [(position.epoch + position.batch / steps_in_epoch) / config.epochs]
    if config.max_steps:
        fractions.append(position.step / config.max_steps)
    if config.max_cpu_seconds:
        fractions.append(position.cpu_seconds / config.max_cpu_seconds)
    return min(1.0, max(fractions))


def _finish_epoch(training: Training, loss_sum: Tensor, seconds: float, *, last: bool) -> dict[str, Any]:
    """Evaluates where it is due, appends the epoch's line to metrics.jsonl and moves on to the next epoch."""
    config, position, accelerator = training.config, training.position, training.accelerator
    loss_sum = accelerator.reduce(loss_sum, reduction="sum")
    images = position.images * accelerator.num_processes
    line: dict[str, Any] = {
        "epoch": position.epoch + 1,
        "step": position.step,
        "loss": loss_sum.item() / images,
        "lr": position.lr,
        "images": images,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(position.cpu_seconds, 3),
    }
    every = config.evaluate_every or max(1, config.epochs // 5)
    if accelerator.is_main_process:
        if last or line["epoch"] % every == 0:
            line["accuracy"] = _accuracy_by_size(training)
        with training.run.metrics_path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
    position.epoch, position.batch = position.epoch + 1, 0
    position.images, position.loss_sum, position.seconds = 0, 0.0, 0.0
    return line


def _accuracy_by_size(training: Training) -> dict[str, float]:
    """Of the averaged weights, on held-out images."""
    accuracy = {}
    for size in training.config.sizes:
        metric = evaluate_module(
            training.average.module,
            training.held_out,
            size,
            training.preprocessing,
            EVALUATION_LIMIT,
            device=training.accelerator.device,
        )
        accuracy[str(size)] = metric.value
    return accuracy


def _agree(accelerator: Accelerator, cpu_seconds: float, save_due: bool, stop_due: bool) -> tuple[float, bool, bool]:
    """Each value's largest over all processes: unless all save and stop at the same step, some wait for ever."""
    if accelerator.num_processes == 1:
        return cpu_seconds, save_due, stop_due
    mine = torch.tensor([[cpu_seconds, save_due, stop_due]], dtype=torch.float32, device=accelerator.device)
    largest = accelerator.gather(mine).amax(dim=0).tolist()
    return largest[0], bool(largest[1]), bool(largest[2])
