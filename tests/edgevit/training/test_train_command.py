"""`edgevit train`: plain lines in a pipe, one line for wrong input, exit 130 with everything saved after Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from edgevit.cli import main
from edgevit.run_folder import RunFolder

MAIN = "from edgevit.cli import main; main()"


@pytest.fixture(scope="module")
def stopped(few_digits, tmp_path_factory):
    """A training of a thousand epochs in a process of its own, sent SIGINT once it has told of its first epoch."""
    out = tmp_path_factory.mktemp("runs") / "run"
    options = ["--data", str(few_digits), "--sizes", "32", "--batch-size", "32", "--epochs", "1000", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "train", "mobilevit_xxs", *options, "--workers", "0", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout
    first_line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return out, first_line, process.returncode, errors


def test_an_epoch_is_a_plain_line_in_a_pipe(stopped):
    _, line, _, _ = stopped
    assert line.startswith("epoch   1  step      3  loss ")
    assert "\x1b" not in line


def test_ctrl_c_saves_and_says_how_to_go_on(stopped):
    out, _, code, errors = stopped
    assert code == 130
    assert f"go on with: edgevit train --resume --out {out}" in errors
    assert "Traceback" not in errors
    assert (out / "state/last.safetensors").exists()
    assert len(RunFolder.open(out).metrics()) >= 1


def test_a_resumed_run_refuses_other_options(stopped):
    out, *_ = stopped
    result = CliRunner().invoke(main, ["train", "--resume", "--out", str(out), "--lr", "0.1"])
    assert result.exit_code == 2
    assert result.output == "edgevit: cannot resume with other options: --lr is 0.1, was 0.002\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mobilevit_xs2", "--data", "digits", "--sizes", "32"], "mobilevit_xs"),
        (["mobilevit_xxs", "--data", "digitz", "--sizes", "32"], "did you mean digits"),
        (["mobilevit_xxs", "--data", "digits", "--sizes", "40"], "nearest: 32 or 64"),
        (["mobilevit_xxs", "--data", "digits", "--sizes", "32", "--augment", "wild"], "none, light, standard"),
        (["mobilevit_xxs", "--data", "digits", "--sizes", "32", "--init", "absent.pt"], "absent.pt"),
        (["mobilevit_xxs", "--data", "digits", "--sizes", "32", "--epochs", "0"], "--epochs 0"),
    ],
)
def test_wrong_input_is_exit_2_and_leaves_nothing(tmp_path, arguments, message):
    result = CliRunner().invoke(main, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "run").exists()
