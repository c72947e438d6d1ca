"""Training learns; interrupted and resumed it is, bit for bit, the training that was never interrupted."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import load_images
from edgevit.evaluation import evaluate_module
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.training.config import TrainConfig
from edgevit.training.loop import fraction_done, seed_step, train
from edgevit.training.setup import parameter_groups
from edgevit.training.signals import Interrupted

SMALL = Size.parse_list("32,64")


@pytest.fixture(scope="module")
def config(few_digits):
    return TrainConfig.of(
        "mobilevit_xxs",
        str(few_digits),
        SMALL,
        epochs=2,
        batch_size=16,
        warmup_steps=4,
        workers=0,
        threads=1,
        evaluate_every=1,
    )


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    """A finished run; tests leave it as it is."""
    return train(config, tmp_path_factory.mktemp("runs") / "uninterrupted")


def assert_same_run(ours, theirs):
    """Averaged weights, raw weights, optimiser's moments and metrics; not the seconds."""
    for file in ("model.safetensors", "state/last.safetensors"):
        left, right = load_file(ours.path / file), load_file(theirs.path / file)
        assert left.keys() == right.keys()
        differing = [name for name in left if not torch.equal(left[name], right[name])]
        assert not differing
    for left, right in zip(ours.metrics(), theirs.metrics(), strict=True):
        timeless = {name: value for name, value in left.items() if "seconds" not in name}
        assert timeless == {name: value for name, value in right.items() if "seconds" not in name}
        assert "accuracy" in timeless


def steps_of(config):
    """Steps of each epoch, counted by training without an interruption elsewhere: 96 images in batches of 16 at 32."""
    from edgevit.data.multi_scale import MultiScaleBatchSampler

    sampler = MultiScaleBatchSampler(
        96, config.sizes, base_size=config.base_size, batch_size=config.batch_size, seed=config.seed
    )
    lengths = []
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        lengths.append(len(sampler))
    return lengths


def test_a_signal_in_mid_epoch_with_workers_loses_nothing(config, uninterrupted, tmp_path):
    first, second = steps_of(config)
    assert first > 2
    assert second > 2

    def interrupt(position, fraction):
        if position.step in (2, first + 1):
            os.kill(os.getpid(), signal.SIGINT if position.step == 2 else signal.SIGTERM)

    with_workers = replace(config, workers=2)
    with pytest.raises(Interrupted, match="stopped after step 3"):
        train(with_workers, tmp_path / "run", on_step=interrupt)
    assert RunFolder.open(tmp_path / "run").metrics() == []
    with pytest.raises(Interrupted, match=f"stopped after step {first + 2}"):
        train(with_workers, tmp_path / "run", resume=True, on_step=interrupt)
    assert_same_run(train(with_workers, tmp_path / "run", resume=True), uninterrupted)


def test_a_crash_goes_on_from_the_last_checkpoint(config, uninterrupted, tmp_path):
    first, _ = steps_of(config)

    def crash(position, fraction):
        if position.step == first + 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        train(config, tmp_path / "run", on_step=crash)
    run = RunFolder.open(tmp_path / "run")
    with run.metrics_path.open("a") as stream:  # as if killed after the second epoch's line, before its checkpoint
        stream.write(json.dumps(run.metrics()[0] | {"epoch": 2}) + "\n")
    assert_same_run(train(config, run.path, resume=True), uninterrupted)


def test_a_checkpoint_falls_due_by_the_clock(config, uninterrupted, tmp_path):
    def crash(position, fraction):
        if position.step == 3:
            raise RuntimeError("power cut")

    due_at_once = replace(config, checkpoint_minutes=0.0)
    with pytest.raises(RuntimeError):
        train(due_at_once, tmp_path / "run", on_step=crash)
    with safe_open(tmp_path / "run/state/last.safetensors", "pt") as file:
        assert json.loads(file.metadata()["about"])["position"]["step"] == 2
    assert_same_run(train(config, tmp_path / "run", resume=True), uninterrupted)


def test_a_finished_run_resumes_to_itself(config, uninterrupted):
    before = uninterrupted.weights_path.read_bytes()
    train(config, uninterrupted.path, resume=True)
    assert uninterrupted.weights_path.read_bytes() == before


def test_the_run_says_what_it_is(config, uninterrupted):
    run = RunFolder.open(uninterrupted.path)
    assert TrainConfig.from_toml(run.config) == config
    assert run.config["num_classes"] == 10
    assert run.config["data_sha256"] == load_images(config.data, "train").sha256
    line = run.metrics()[-1]
    assert (line["epoch"], line["images"] >= 96, line["step"]) == (2, True, sum(steps_of(config)))
    model = create_model(config.model, 10)
    model.load_state_dict(load_file(run.weights_path))  # under the model's own names
    metric = evaluate_module(model, load_images(config.data, "test"), SMALL[0], run.preprocessing)
    assert metric.value == line["accuracy"]["32"]


def test_wrong_input_is_refused_before_anything_is_written(config, uninterrupted, tmp_path):
    out = tmp_path / "new"
    with pytest.raises(EdgeVitError, match="multiple of 32; nearest: 32 or 64"):
        train(replace(config, sizes=(Size.image(48, 48),)), out)
    with pytest.raises(EdgeVitError, match="mobilevit_xxs"):
        train(replace(config, model="mobilevit_xx"), out)
    with pytest.raises(EdgeVitError, match="no such run folder"):
        train(config, out, resume=True)
    assert not out.exists()
    with pytest.raises(EdgeVitError, match=r"--resume.*--out"):
        train(config, uninterrupted.path)
    with pytest.raises(EdgeVitError, match="--seed is 1, was 0"):
        train(replace(config, seed=1), uninterrupted.path, resume=True)


def test_a_damaged_checkpoint_is_one_line(config, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.path, tmp_path / "run")
    state = tmp_path / "run/state/last.safetensors"
    state.write_bytes(state.read_bytes()[:5000])
    with pytest.raises(EdgeVitError, match="cannot be resumed from") as error:
        train(config, tmp_path / "run", resume=True)
    assert "\n" not in str(error.value)


def test_max_steps_ends_it_with_the_rate_come_down(config, tmp_path):
    rates = []
    run = train(
        replace(config, max_steps=8, min_lr=0.0),
        tmp_path / "run",
        on_step=lambda position, _: rates.append(position.lr),
    )
    assert len(rates) == 8
    assert rates[-1] < 0.1 * max(rates)
    assert "accuracy" in run.metrics()[-1]


def test_a_cpu_budget_ends_it(config, tmp_path):
    run = train(replace(config, epochs=1000, max_cpu_seconds=1.0), tmp_path / "run")
    assert run.metrics()[-1]["cpu_seconds"] >= 1
    assert run.metrics()[-1]["epoch"] < 1000
    assert train(replace(config, epochs=1000, max_cpu_seconds=1.0), run.path, resume=True).metrics() == run.metrics()


def test_precisions_in_one_process(config, tmp_path):
    losses = {}
    for precision in ("no", "bf16"):
        run = train(replace(config, max_steps=2, precision=precision), tmp_path / precision)
        losses[precision] = run.metrics()[-1]["loss"]
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.05)


def test_weights_to_start_from(config, uninterrupted, tmp_path):
    started = train(replace(config, init=str(uninterrupted.path), max_steps=1, lr=1e-9, warmup_lr=1e-9), tmp_path / "a")
    ours, theirs = load_file(started.weights_path), load_file(uninterrupted.weights_path)
    for name in ("stem.conv.weight", "classifier.weight"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_fraction_takes_the_nearest_limit(config):
    from edgevit.training.checkpoint import Position

    position = Position(epoch=1, batch=5, step=25, cpu_seconds=9.0)
    assert fraction_done(replace(config, epochs=10), position, 20) == 0.125
    assert fraction_done(replace(config, epochs=10, max_steps=50), position, 20) == 0.5
    assert fraction_done(replace(config, epochs=10, max_cpu_seconds=10.0), position, 20) == 0.9


def test_dropout_is_a_function_of_seed_step_and_rank():
    def draw(*key):
        seed_step(*key)
        return nn.functional.dropout(torch.ones(1000))

    assert torch.equal(draw(0, 7, 0), draw(0, 7, 0))
    for other in ((1, 7, 0), (0, 8, 0), (0, 7, 1)):
        assert not torch.equal(draw(0, 7, 0), draw(*other))


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    decayed, free = parameter_groups(model, 0.5)
    assert decayed == {"params": [model[0].weight, model[3].weight], "weight_decay": 0.5}
    assert free["weight_decay"] == 0.0
    assert {id(p) for p in free["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters(), model[3].bias)}


def test_it_learns(tmp_path):
    """Seventy steps on the real digits: far above chance, which is 0.1, on images that it never saw, at both sizes."""
    config = TrainConfig.of(
        "mobilevit_xxs", "digits", SMALL, epochs=4, batch_size=64, warmup_steps=10, max_steps=70, threads=1
    )
    run = train(config, tmp_path / "run")
    first, *_, last = run.metrics()
    assert last["loss"] < 0.9 * first["loss"]
    assert last["accuracy"]["32"] > 0.4
    assert last["accuracy"]["64"] > 0.2  # it shares its normalisation with 32, and so comes later
