"""Real architectures, exported to three formats and checked: how much of the field the converters cover.

    python benchmarks/coverage.py                      # goes on where it stopped
    python benchmarks/coverage.py --only 'swin|vit' --retry-failed

Each model gets scaled random weights (`edgevit.sources.random_weights`) and is exported with batch 1 through
`converters.export`, which runs the file and compares it with the module. ONNX and TFLite are fp32; Core ML is its
default fp16 and, only where that misses its tolerance, fp32 too, in a row of its own. One process for each, with
limits on its processor time and memory. The table goes to docs/coverage.csv after every row.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "coverage.csv"
FORMATS = {"onnx": "fp32", "tflite": "fp32", "coreml": "fp16"}
BARS = {"onnx": 0.95, "tflite": 0.90, "coreml": 0.90}
SIDE = 160  # of pictures, where a model takes any size and no configuration names one
RESULT = "result: "  # begins the line of a process that holds its row
MISSED = "fp16 allows"  # in the message of a file that misses fp16's tolerance
# What upstream knows of: (format, part of the reason, where it is discussed).
UPSTREAM = (("coreml", "upsample_bicubic2d", "https://github.com/apple/coremltools/issues/1747"),)


@dataclass(frozen=True)
class Row:
    """One attempt. `error` is the largest difference as a share of the output's standard deviation."""

    model: str
    family: str
    format: str
    precision: str
    verified: str  # yes | no
    parameters: str = ""
    size: str = ""
    error: str = ""
    snr_db: str = ""
    seconds: str = ""  # of processor time: conversion and check
    reason: str = ""
    issue: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.format, self.precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="models whose name holds this regular expression")
    parser.add_argument("--formats", default=",".join(FORMATS), help="with commas")
    parser.add_argument("--retry-failed", action="store_true", help="try again what was not verified")
    parser.add_argument("--seconds", type=int, default=300, help="processor time that one export may take")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="memory that one export may take")
    parser.add_argument("--wrap", default="", metavar="COMMAND", help="put before each process, such as 'nice -n 10'")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--one", nargs=4, metavar=("SOURCE", "FORMAT", "PRECISION", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _limit(args.seconds)
        print(RESULT + json.dumps(asdict(export_one(*args.one))), flush=True)
        return

    from coverage_models import CASES

    cases = [case for case in CASES.values() if re.search(args.only, case.source)]
    for number, case in enumerate(cases, 1):
        for form in args.formats.split(","):
            for precision in (FORMATS[form], "fp32"):
                row = read(args.table).get((case.source, form, precision))
                if row is None or (args.retry_failed and row.verified == "no"):
                    row = attempt(case.source, case.family, form, precision, args)
                    write(args.table, row)
                    print(f"{number}/{len(cases)} {_line(row)}", flush=True)
                if form != "coreml" or MISSED not in row.reason:
                    break
    print(summary(list(read(args.table).values())))


def export_one(source: str, form: str, precision: str, folder: str) -> Row:
    """Exports one model in this process. Whatever goes wrong is the row's reason."""
    from coverage_models import CASES

    import converters
    from converters import parity
    from converters.errors import EdgeVitError, first_line
    from converters.flops import count_parameters
    from converters.signature import Size
    from edgevit.samples import sample_inputs

    case = CASES[source]
    row = Row(source, case.family, form, precision, "no")
    started = time.process_time()
    try:
        model = case.load(Path(folder))
        size = model.size
        movable = any(dim.minimum != dim.maximum for dim in model.signature.dims)
        if movable and not source.startswith("config:"):
            size = Size.image(SIDE, SIDE)
        row = replace(row, parameters=str(count_parameters(model.module)), size=str(size))
        started = time.process_time()
        [artifact] = converters.export(
            model.module,
            model.signature,
            name=model.name,
            out=Path(folder),
            formats=[form],
            sizes=[size],
            precision=precision,
            batch=1,
            sample_inputs=sample_inputs(model),
            preprocessing=model.preprocessing,
            progress=lambda line: print(line, file=sys.stderr),
        )
    except EdgeVitError as error:
        row = replace(row, reason=_shortened(str(error)))
    except Exception as error:  # of a library's code for building a model
        row = replace(row, reason=_shortened(f"{type(error).__name__}: {first_line(error)}"))
    else:
        worst = parity.worst(artifact.metadata.verified)
        row = replace(row, verified="yes", error=f"{worst.max_abs_over_std:.1e}", snr_db=f"{worst.snr_db:.0f}")
    return replace(row, seconds=f"{time.process_time() - started:.0f}")


def attempt(source: str, family: str, form: str, precision: str, args: argparse.Namespace) -> Row:
    """One export in a process of its own, whatever becomes of that."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(args.wrap), sys.executable, __file__, "--seconds", str(args.seconds)]
        command += ["--one", source, form, precision, folder]
        log = Path(folder, "log")
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            reason = _watch(process, args.gigabytes * 1e9)
        lines = log.read_text(errors="replace").splitlines()
    result = next((line for line in reversed(lines) if line.startswith(RESULT)), None)
    row = Row(source, family, form, precision, "no")
    if result is not None:
        row = Row(**json.loads(result.removeprefix(RESULT)))
    else:
        reason = reason or _ending(process.returncode, args.seconds)
        last = next((line for line in reversed(lines) if line.strip()), "")
        row = replace(row, reason=_shortened(f"{reason}; last line: {last}" if last else reason))
    return row


def read(table: Path) -> dict[tuple[str, str, str], Row]:
    if not table.exists():
        return {}
    with table.open(newline="") as stream:
        rows = [Row(**line) for line in csv.DictReader(stream)]
    return {row.key: row for row in rows}


def write(table: Path, row: Row) -> None:
    """Adds or replaces a row; the order is that of the keys. A model that now passes fp16 has no row of fp32."""
    rows = read(table) | {row.key: row}
    if row.format == "coreml" and row.precision == "fp16" and MISSED not in row.reason:
        rows.pop((row.model, "coreml", "fp32"), None)
    draft = table.with_suffix(".draft")
    with draft.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(replace(rows[key], issue=upstream(rows[key]))) for key in sorted(rows))
    draft.replace(table)


def upstream(row: Row) -> str:
    """Where a failure is discussed, if anywhere."""
    return next((url for form, part, url in UPSTREAM if form == row.format and part in row.reason), "")


def summary(rows: list[Row]) -> str:
    """A line per format: verified of tried, the bar; for Core ML also what fp32 adds where fp16 is too coarse."""
    lines = []
    for form, precision in FORMATS.items():
        tried = [row for row in rows if row.format == form and row.precision == precision]
        good = sum(row.verified == "yes" for row in tried)
        if not tried:
            continue
        line = f"{form:7} {precision}: {good} of {len(tried)} verified, {good / len(tried):.1%} (bar {BARS[form]:.0%})"
        more = sum(row.verified == "yes" for row in rows if row.format == form and row.precision != precision)
        lines.append(line + (f"; {more} more in fp32, {(good + more) / len(tried):.1%} together" if more else ""))
    return "\n".join(lines)


def _watch(process: subprocess.Popen[bytes], limit_bytes: float) -> str:
    """Waits, and ends a process that takes too much memory; the reason, or nothing."""
    while True:
        try:
            process.wait(timeout=1)
            return ""
        except subprocess.TimeoutExpired:
            used = _resident_bytes(process.pid)
        if used > limit_bytes:
            process.kill()
            process.wait()
            return f"took more than {limit_bytes / 1e9:g} GB of memory"


def _resident_bytes(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        return sum(item.memory_info().rss for item in (parent, *parent.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _limit(seconds: int) -> None:
    """Of processor time, and ten times as much of any time, for a process that waits for ever."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(10 * seconds)


def _ending(code: int, seconds: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took more than {seconds} s of processor time"
    if code == -signal.SIGALRM:
        return f"did not end in {10 * seconds} s"
    return f"the process ended with {signal.Signals(-code).name if code < 0 else code}"


def _shortened(text: str) -> str:
    portable = re.sub(r"/\S*?/(?=site-packages/)", "", text)  # no folders of this machine
    return " ".join(portable.split())[:300]


def _line(row: Row) -> str:
    outcome = f"error {row.error}, SNR {row.snr_db} dB" if row.verified == "yes" else f"FAILED: {row.reason}"
    return f"{row.model} {row.format} {row.precision}, {row.seconds} s: {outcome}"


if __name__ == "__main__":
    main()
