"""How the learning rate and the averaging of weights run over a training; both are functions of the step alone."""

from __future__ import annotations

import math


def learning_rate(
    step: int, fraction: float, *, lr: float, warmup_lr: float, min_lr: float, warmup_steps: int
) -> float:
    """Linear from `warmup_lr` to `lr` in `warmup_steps`, then half a cosine down to `min_lr` at `fraction` 1.

    `fraction` is how much of the training is over, 0 to 1, by steps or by a time budget. The factor keeps counting from
    0 during warm-up, so that a warm-up longer than the training does not stop the decay (Loshchilov and Hutter,
    arXiv 1608.03983, equation 5, without restarts).
    """
    cosine = min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
    if step < warmup_steps:
        return min(cosine, warmup_lr + (lr - warmup_lr) * step / warmup_steps)
    return cosine


def ema_decay(step: int, decay: float) -> float:
    """min(decay, (1 + step) / (10 + step)): averages the last tenth of a short training, not its beginning."""
    return min(decay, (1 + step) / (10 + step))
