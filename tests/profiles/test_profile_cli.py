"""`edgevit profile`: a table in a pipe, JSON for machines, one line and an exit code for what is wrong."""

import json

import pytest
from click.testing import CliRunner
from tiny_models import metadata, write_onnx

from edgevit.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def test_a_row_for_each_size(tmp_path):
    result = run(write_onnx(tmp_path / "tiny.onnx", about=metadata("onnx", ("16", "32"), "32")))
    assert result.exit_code == 0, result.output
    head, *rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("size", "16", "32"))]
    assert head[:3] == ["size", "thr", "median"]
    assert [row[:2] for row in rows] == [["16", "1"], ["32", "1"]]
    assert all(float(row[2]) > 0 for row in rows)
    assert "onnxruntime" in result.stdout
    assert "load average before" in result.stdout


def test_json_holds_every_sample(tmp_path):
    path = write_onnx(tmp_path / "tiny.onnx", about=metadata("onnx", ("16", "32"), "32"))
    result = run(path, "--size", "32", "--json")
    assert result.exit_code == 0, result.output
    (measurement,) = json.loads(result.stdout)
    samples = [sample for process in measurement["processes"] for sample in process["wall_ms"]]
    assert measurement["summary"]["min_ms"] == min(samples)
    assert measurement["summary"]["samples"] == len(samples)
    assert measurement["cell"]["size"] == "32"


@pytest.mark.parametrize(
    ("make", "arguments", "code", "line"),
    [
        (lambda path: None, (), 2, "no such file"),
        (lambda path: path.write_bytes(b"garbage" * 99), (), 2, "INVALID_PROTOBUF"),
        (lambda path: write_onnx(path), (), 2, "give its size"),
        (lambda path: write_onnx(path, about=metadata("onnx", ("16",), "16")), ("--size", "64"), 2, "which has 16"),
        (lambda path: write_onnx(path, about=metadata("onnx", ("16",), "16")), ("--processes", "1"), 2, "at least 3"),
        (lambda path: write_onnx(path, about=metadata("onnx", ("16",), "16", 0.5)), (), 3, "wrong on this device"),
    ],
)
def test_what_is_wrong_is_one_line(make, arguments, code, line, tmp_path):
    make(tmp_path / "tiny.onnx")
    result = run(tmp_path / "tiny.onnx", *arguments)
    assert result.exit_code == code
    (message,) = [text for text in result.stderr.splitlines() if text.startswith("edgevit: ")]
    assert line in message
    assert "Traceback" not in result.output
