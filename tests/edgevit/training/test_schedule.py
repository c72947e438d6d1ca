"""The learning rate and the averaging follow their formulas, at every step, without any state."""

import math

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from edgevit.training.schedule import ema_decay, learning_rate

RATES = {"lr": 2e-3, "warmup_lr": 2e-4, "min_lr": 1e-4, "warmup_steps": 40}


def test_the_cosine_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=2e-3)
    reference = CosineAnnealingLR(optimizer, T_max=200, eta_min=1e-4)
    for step in range(200):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(step, step / 200, **RATES | {"warmup_steps": 0}) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        reference.step()


def test_the_warm_up_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=2e-3)
    reference = LinearLR(optimizer, start_factor=0.1, total_iters=40)
    for step in range(40):
        assert learning_rate(step, 0.0, **RATES) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        reference.step()


def test_it_ends_low_even_when_the_warm_up_is_longer_than_the_training():
    rates = [learning_rate(step, step / 30, **RATES | {"warmup_steps": 3000}) for step in range(31)]
    assert rates[-1] == pytest.approx(1e-4)
    assert max(rates) <= 2e-3


def test_a_short_training_averages_its_last_part():
    """Weight of each step's weights in the average after 100 steps, by unrolling it."""
    weights = np.zeros(100)
    for step in range(100):
        decay = 0.0 if step == 0 else ema_decay(step, 0.9999)
        weights *= decay
        weights[step] = 1 - decay
    assert math.isclose(weights.sum(), 1)
    assert weights[0] < 1e-6  # with 0.9999 throughout, the initial weights would be 99 % of it
    assert weights[50:].sum() > 0.99


def test_a_long_training_reaches_the_decay_that_was_asked_for():
    assert ema_decay(10**6, 0.999) == 0.999
