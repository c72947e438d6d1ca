"""The breadth benchmark's own machinery: its table, what it skips and repeats, and its limits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import coverage as module  # the benchmark, not the package of that name

    assert Path(module.__file__).parent == BENCHMARKS
    yield module
    for name in ("coverage", "coverage_models"):
        sys.modules.pop(name, None)


def run(bench, monkeypatch, table, outcomes, *arguments):
    """Runs the benchmark with `outcomes(source, form, precision)` in place of an export; what was tried."""
    tried = []

    def attempt(source, family, form, precision, _args):
        tried.append((source, form, precision))
        reason = outcomes(source, form, precision)
        return bench.Row(source, family, form, precision, "no" if reason else "yes", reason=reason)

    monkeypatch.setattr(bench, "attempt", attempt)
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--table", str(table), "--only", "resnet18|gpt2", *arguments])
    bench.main()
    return tried


def test_it_goes_on_where_it_stopped_and_tries_fp32_where_fp16_is_too_coarse(bench, monkeypatch, tmp_path, capsys):
    table = tmp_path / "coverage.csv"

    def outcomes(source, form, precision):
        if (form, precision, source) == ("coreml", "fp16", "timm:resnet18"):
            return "off by 0.03; fp16 allows 0.02"
        return "it crashed" if (source, form) == ("config:gpt2", "tflite") else ""

    everything = run(bench, monkeypatch, table, outcomes)
    assert everything == [
        ("timm:resnet18", "onnx", "fp32"),
        ("timm:resnet18", "tflite", "fp32"),
        ("timm:resnet18", "coreml", "fp16"),
        ("timm:resnet18", "coreml", "fp32"),
        ("config:gpt2", "onnx", "fp32"),
        ("config:gpt2", "tflite", "fp32"),
        ("config:gpt2", "coreml", "fp16"),
    ]
    first = table.read_text()
    assert run(bench, monkeypatch, table, outcomes) == []
    assert table.read_text() == first
    said = capsys.readouterr().out
    assert "onnx    fp32: 2 of 2 verified, 100.0% (bar 95%)" in said
    assert "tflite  fp32: 1 of 2 verified, 50.0% (bar 90%)" in said
    assert "coreml  fp16: 1 of 2 verified, 50.0% (bar 90%); 1 more in fp32, 100.0% together" in said
    again = run(bench, monkeypatch, table, lambda *_: "", "--retry-failed")
    assert again == [("timm:resnet18", "coreml", "fp16"), ("config:gpt2", "tflite", "fp32")]
    assert ("timm:resnet18", "coreml", "fp32") not in bench.read(table)
    assert all(row.verified == "yes" for row in bench.read(table).values())


def test_an_export_in_a_process_of_its_own(bench, tmp_path):
    command = [sys.executable, BENCHMARKS / "coverage.py", "--one", "timm:nothing", "onnx", "fp32", str(tmp_path)]
    code = f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import coverage_models as m; "
    code += "m.CASES['timm:nothing'] = m.Case('none', 'timm:nothing'); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, command[1:])], capture_output=True, text=True, env=environment
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith(bench.RESULT)]
    assert "timm has no model of that name" in line


def test_too_much_memory_or_time_ends_a_process_and_is_said(bench):
    greedy = subprocess.Popen([sys.executable, "-c", "x = bytearray(300_000_000)\nwhile True: pass"])
    assert bench._watch(greedy, 0.2e9) == "took more than 0.2 GB of memory"
    assert greedy.returncode == -signal.SIGKILL
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import coverage; coverage._limit(1)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", code])
    assert bench._watch(busy, 1e12) == ""
    assert bench._ending(busy.returncode, 1) == "took more than 1 s of processor time"
    assert bench._ending(-signal.SIGSEGV, 1) == "the process ended with SIGSEGV"


def test_every_case_has_a_name_and_every_configuration_builds(bench, tmp_path):
    import coverage_models

    assert len(coverage_models.CASES) >= 40
    assert {case.source.partition(":")[0] for case in coverage_models.CASES.values()} == {
        "timm",
        "torchvision",
        "config",
    }
    for name, build in coverage_models.CONFIGS.items():
        config, architecture = build()
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "config.json").is_file()


def test_the_table_in_the_docs_is_sorted_and_says_why_a_file_failed(bench):
    rows = list(bench.read(bench.TABLE).values())
    assert rows
    assert [row.key for row in rows] == sorted(row.key for row in rows)
    for row in rows:
        assert bool(row.reason) == (row.verified == "no")
