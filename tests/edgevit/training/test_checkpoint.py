"""A checkpoint is whole or it is the one before, gives back what it was given, and is refused when it is another's."""

import resource

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from converters.errors import EdgeVitError
from edgevit.training.checkpoint import Position, load_state, save_state, save_weights


def trained(channels=4):
    """A model in channels_last, its average and its optimiser after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)).to(memory_format=torch.channels_last)
    average = AveragedModel(model, use_buffers=True)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    step(model, average, optimizer, 3)
    return model, average, optimizer


def step(model, average, optimizer, count):
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        model(image).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


def save(folder, model, average, optimizer, position=None):
    position = position or Position(epoch=2, batch=3, step=19, loss_sum=0.1 + 0.2, images=7)
    parts = {"module": model, "average": average, "optimizer": optimizer}
    save_state(folder, position, **parts, sampler={"epoch": 2, "consumed": 3}, scaler=None)
    return position


def test_what_comes_back_goes_on_as_what_was_saved(tmp_path):
    saved = trained()
    position = save(tmp_path, *saved)
    fresh = trained()
    step(*fresh, 5)  # so that nothing agrees by chance
    found, sampler, scaler = load_state(tmp_path, module=fresh[0], average=fresh[1], optimizer=fresh[2])
    assert (found, sampler, scaler) == (position, {"epoch": 2, "consumed": 3}, None)
    step(*saved, 4)
    step(*fresh, 4)
    for ours, theirs in zip(fresh[:2], saved[:2], strict=True):
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name


def test_weights_have_the_modules_names(tmp_path):
    model, *_ = trained()
    save_weights(model, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    model, average, optimizer = trained()
    position = save(tmp_path, model, average, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(EdgeVitError, match="cannot write it") as error:
            save(tmp_path, model, average, optimizer, Position(step=20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert load_state(tmp_path, module=model, average=average, optimizer=optimizer)[0] == position
    assert [item.name for item in tmp_path.iterdir()] == ["last.safetensors"]


def test_what_is_not_ours_is_refused(tmp_path):
    model, average, optimizer = trained()
    parts = {"module": model, "average": average, "optimizer": optimizer}
    with pytest.raises(EdgeVitError, match="no checkpoint to resume from"):
        load_state(tmp_path, **parts)
    save(tmp_path, *trained(channels=5))
    with pytest.raises(EdgeVitError, match="cannot be resumed from"):
        load_state(tmp_path, **parts)
    save_file({"weight": torch.zeros(1)}, tmp_path / "last.safetensors")
    with pytest.raises(EdgeVitError, match="not a training state"):
        load_state(tmp_path, **parts)
