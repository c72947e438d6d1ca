"""A sweep: everything in the store after it, whatever failed or killed it on the way."""

import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tiny_models import PYTHON, QUICK, metadata, write_onnx

from converters.artifact import artifact_sha256
from converters.signature import Size
from profiles.profile import cell_of, profile
from profiles.store import AccuracyKey, Measurement, Metric, Store
from profiles.sweep import Evaluation, Plan, sweep

SIZES = tuple(Size.parse(size) for size in ("16", "32"))
PLAN = Plan(formats=("onnx", "second"), sizes=SIZES, threads=(1, 2))


class World:
    """Artifacts on disk, and a measure and an evaluation that count their calls and do as they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.measured, self.evaluated, self.made = folder, [], [], []
        self.on_measure = self.on_evaluate = self.on_make = lambda call: None
        for number, name in enumerate(PLAN.formats):
            about = metadata("onnx", ("16", "32"), golden_size="32", golden_error=number / 1e6)
            write_onnx(folder / f"{name}.onnx", about=about)

    def make_artifact(self, fmt, size):
        self.made.append((fmt, str(size)))
        self.on_make(len(self.made))
        return self.folder / f"{fmt}.onnx"

    def measure(self, path, *, size, threads, processes, time_limit_s):
        self.measured.append((path.stem, str(size), threads))
        self.on_measure(len(self.measured))
        cell = cell_of(path, size=size, threads=threads)
        summary = {"median_ms": 1.0, "median_low_ms": 0.9, "median_high_ms": 1.1}
        return Measurement(cell, "ok", {"name": path.name}, summary=summary)

    def evaluate(self, path, size):
        def measure():
            self.evaluated.append((path.stem, str(size)))
            self.on_evaluate(len(self.evaluated))
            return Metric("accuracy", 0.9, 0.8, 0.95, 100)

        return Evaluation(
            AccuracyKey(artifact_sha256(path), str(size), "cpu", "d" * 64, "test", 1.0), "digits", measure
        )

    def sweep(self, plan=PLAN, **changes):
        store = Store(self.folder / "runs.db")
        given = {"make_artifact": self.make_artifact, "evaluate": self.evaluate, "measure": self.measure} | changes
        return sweep(plan, store, **given), store


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_measures_every_cell_and_evaluates_each_artifact_once_a_size(world):
    steps = []
    result, store = world.sweep(progress=steps.append)
    assert len(store.measurements()) == len(result.measurements) == 8
    assert len(store.metrics()) == len(result.metrics) == 4
    assert sorted(world.evaluated) == [("onnx", "16"), ("onnx", "32"), ("second", "16"), ("second", "32")]
    assert not result.failures
    assert {step.total for step in steps} == {12}
    assert steps[-1].done == 12
    assert [step.done for step in steps] == sorted(step.done for step in steps)


def test_neighbouring_cells_are_of_different_artifacts(world):
    world.sweep()
    names = [name for name, _, _ in world.measured]
    assert names == ["onnx", "second"] * 4


def test_a_second_sweep_measures_nothing_and_finds_everything(world):
    first, store = world.sweep()
    before = [dataclasses.asdict(item) for item in store.measurements()]
    world.measured.clear(), world.evaluated.clear()
    second, store = world.sweep()
    assert not world.measured
    assert not world.evaluated
    assert [item.cell for item in second.measurements] == [item.cell for item in first.measurements]
    assert [dataclasses.asdict(item) for item in store.measurements()] == before


def test_another_file_under_the_same_name_is_another_cell(world):
    world.sweep()
    world.measured.clear()
    write_onnx(world.folder / "second.onnx", about=metadata("onnx", ("16", "32"), "32", golden_error=1e-5))
    world.sweep()
    assert {name for name, _, _ in world.measured} == {"second"}


def test_an_exception_ends_one_cell_and_the_next_sweep_tries_it_again(world):
    def fail(number):
        if number == 3:
            raise RuntimeError("kernel\npanic")

    world.on_measure = world.on_evaluate = world.on_make = fail
    result, store = world.sweep()
    assert [item.status for item in store.measurements()].count("ok") == 6  # one not made, one not measured
    assert [item.reason for item in store.measurements() if item.status == "failed"] == ["RuntimeError: kernel panic"]
    assert len(store.metrics()) == 2
    assert {failure.reason for failure in result.failures} == {"RuntimeError: kernel panic"}
    assert [failure.what for failure in result.failures] == [
        "onnx 32 threads=1",  # the third to be made
        "second 32 threads=1",  # the third to be measured
        "second 32 accuracy",  # the third to be evaluated: `onnx 32` had no artifact
    ]
    world.on_measure = world.on_evaluate = world.on_make = lambda number: None
    result, store = world.sweep()
    assert not result.failures
    assert [item.status for item in store.measurements()] == ["ok"] * 8
    assert len(store.metrics()) == 4


def test_latency_only(world):
    result, store = world.sweep(evaluate=None)
    assert len(store.measurements()) == 8
    assert not store.metrics()
    assert not result.metrics


def test_real_measurements_of_a_good_a_wrong_and_a_garbage_file(tmp_path):
    write_onnx(tmp_path / "good.onnx", about=metadata("onnx", ("32",), "32"))
    write_onnx(tmp_path / "wrong.onnx", about=metadata("onnx", ("32",), "32", golden_error=0.5))
    (tmp_path / "garbage.onnx").write_bytes(b"garbage" * 100)
    store = Store(tmp_path / "runs.db")
    result = sweep(
        Plan(("good", "wrong", "garbage"), SIZES[1:]),
        store,
        make_artifact=lambda fmt, size: tmp_path / f"{fmt}.onnx",
        measure=lambda path, **given: profile(path, protocol=QUICK, **given),
    )
    found = {item.artifact["name"]: item.status for item in store.measurements()}
    assert found == {"good.onnx": "ok", "wrong.onnx": "wrong_on_device", "garbage.onnx": "failed"}
    assert [failure.what for failure in result.failures] == ["garbage 32 threads=1"]


def sweep_that_kills_itself(folder: Path, measurements: int, evaluations: int) -> None:
    """Runs in a process of its own; dies by SIGKILL inside that measurement or evaluation (0: never)."""
    world = World.__new__(World)
    world.folder, world.measured, world.evaluated, world.made = folder, [], [], []
    world.on_make = lambda number: None
    world.on_measure = lambda number: number == measurements and os.kill(os.getpid(), signal.SIGKILL)
    world.on_evaluate = lambda number: number == evaluations and os.kill(os.getpid(), signal.SIGKILL)
    world.sweep()


@pytest.mark.parametrize(("measurements", "evaluations"), [(1, 0), (4, 0), (0, 3), (8, 0)])
def test_killed_at_any_moment_it_goes_on_where_it_stopped(measurements, evaluations, world):
    code = (
        "import sys; from pathlib import Path; from test_sweep import sweep_that_kills_itself as f;"
        "f(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [PYTHON, "-c", code, world.folder, str(measurements), str(evaluations)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    earlier = Store(world.folder / "runs.db")
    rows = {item.cell: item for item in earlier.measurements()}
    metrics = {key: metric for key, _, metric in earlier.metrics()}
    if measurements:
        assert len(rows) == measurements - 1  # every one that had finished is there
    else:
        assert len(metrics) == evaluations - 1

    result, store = world.sweep()
    assert len(world.measured) == 8 - len(rows)
    assert len(world.evaluated) == 4 - len(metrics)
    assert len(result.measurements) == 8
    after = {item.cell: item for item in store.measurements()}
    assert len(after) == 8
    assert len(store.metrics()) == 4
    assert all(after[cell] == item for cell, item in rows.items())  # created_at too
