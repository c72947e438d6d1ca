"""`accelerate launch` with two processes: the same sizes, no shared image, equal weights; one of them writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edgevit.run_folder import RunFolder

SCRIPT = Path(__file__).with_name("recording_rank.py")


@pytest.fixture(scope="module")
def launched(few_digits, tmp_path_factory):
    """The run folder, and each process's record."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--machine_rank", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    local = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*launch, str(SCRIPT), str(few_digits), str(folder / "run"), str(folder)],
        env=os.environ | local | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run", [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_there_were_two(launched):
    _, records = launched
    assert [record["processes"] for record in records] == [2, 2]


def test_both_draw_the_same_sizes(launched):
    _, (first, second) = launched
    shapes = [step["shape"] for step in first["steps"]]
    assert shapes == [step["shape"] for step in second["steps"]]
    assert {shape[-1] for shape in shapes} == {32, 64}


def test_they_share_no_image_and_see_each_of_them_in_each_epoch(launched):
    _, (first, second) = launched
    for epoch in (0, 1):
        pairs = [
            (set(ours["indices"]), set(theirs["indices"]))
            for ours, theirs in zip(first["steps"], second["steps"], strict=True)
            if ours["epoch"] == epoch
        ]
        assert not any(ours & theirs for ours, theirs in pairs)
        assert set().union(*(ours | theirs for ours, theirs in pairs)) == set(range(96))


def test_they_end_with_equal_weights(launched):
    _, (first, second) = launched
    assert first["weights"] == second["weights"]


def test_one_process_wrote(launched):
    run = RunFolder.open(launched[0])
    assert run.config["processes"] == 2
    assert [line["epoch"] for line in run.metrics()] == [1, 2]
    assert all(line["images"] >= 96 for line in run.metrics())
    assert run.weights_path.exists()
