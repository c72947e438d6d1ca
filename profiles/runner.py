"""Times one model file in one fresh process. Needs numpy, the standard library and a runtime; copy it to a device.

    python runner.py --model mobilevit_s.onnx --runtime onnxruntime --threads 1 --inputs inputs.npz --json

prints one JSON object: `wall_ms` and `cpu_ms` of every run, `load_ms`, `warm_up`, memory, threads, versions, and what
the model really ran on. A failure prints `{"error": "…"}` and exits with 1. With `--describe` nothing is timed: the
object names the file's inputs, shapes and dtypes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
RUNTIMES = ("onnxruntime", "litert")

WARM_UP_TOLERANCE = 0.02  # two consecutive windows whose medians agree this closely are steady
WARM_UP_WINDOW_RUNS = 5
WARM_UP_WINDOW_SECONDS = 0.05  # a window of a very fast model holds more runs, or its median would be noise


class Model(NamedTuple):
    """A loaded file: arrays in, arrays out, and what can be asked of it."""

    run: Callable[[Arrays], Arrays]
    describe: Callable[[], list[dict[str, Any]]]  # inputs: name, shape (int, or str where free), dtype
    facts: Callable[[], dict[str, Any]]  # valid after the first run: what it really runs on, and its settings


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    result_stream = _keep_stdout_for_the_result()
    if options.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    try:
        result = describe(options) if options.describe else measure(options)
    except Exception as error:  # whatever a runtime raises is this measurement's reason, in one line
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    with result_stream:
        result_stream.write((json.dumps(result) if options.json else _one_line(result)) + "\n")
    return 1 if "error" in result else 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, first run, warm-up, timed runs, and last (so that it cannot disturb them) the check."""
    inputs = _read_arrays(options.inputs)
    check = _read_arrays(options.check) if options.check else None
    importlib.import_module("onnxruntime") if options.runtime == "onnxruntime" else _interpreter_class()
    threads_before, memory_before_mb = _count_threads(), peak_memory_mb()

    started = time.perf_counter_ns()
    model = load(options.model, options.runtime, options.threads, options.signature)
    load_ms = (time.perf_counter_ns() - started) / 1e6

    started = time.perf_counter_ns()
    outputs = model.run(inputs)
    first_run_ms = (time.perf_counter_ns() - started) / 1e6
    if options.outputs:
        _save_arrays(options.outputs, outputs)

    warm_up = _warm_up(lambda: model.run(inputs), options.warm_up_seconds)
    wall_ms, cpu_ms = _time_runs(lambda: model.run(inputs), options.min_runs, options.max_runs, options.max_seconds)
    result = {
        "runtime": options.runtime,
        "runtime_version": runtime_version(options.runtime),
        "load_ms": load_ms,
        "first_run_ms": first_run_ms,
        "warm_up": warm_up,
        "wall_ms": wall_ms,
        "cpu_ms": cpu_ms,
        "peak_memory_mb": peak_memory_mb(),
        "memory_before_load_mb": memory_before_mb,
        "threads_asked": options.threads,
        "threads_started": _difference(_count_threads(), threads_before),
        **model.facts(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if check is not None:
        checked = load(options.model, options.runtime, options.threads, options.check_signature)
        _save_arrays(options.check_outputs, checked.run(check))
    return result


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """The inputs that the file (or its signature) wants; nothing is run."""
    model = load(options.model, options.runtime, options.threads, options.signature)
    return {"inputs": model.describe(), "runtime_version": runtime_version(options.runtime)}


def load(path: str, runtime: str, threads: int, signature: str | None = None) -> Model:
    """The file in its runtime with `threads` threads. Raises whatever the runtime raises for a file it cannot read."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file")
    return _load_onnx(path, threads) if runtime == "onnxruntime" else _load_litert(path, threads, signature)


def _load_onnx(path: str, threads: int) -> Model:
    import onnxruntime

    # The pool's threads spin by default: that burns CPU time which is not the model's, and disturbs its neighbours.
    settings = {"session.intra_op.allow_spinning": "0"}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    for key, value in settings.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def inputs() -> list[dict[str, Any]]:
        return [
            {"name": item.name, "shape": list(item.shape), "dtype": _onnx_dtype(item.type)}
            for item in session.get_inputs()
        ]

    def facts() -> dict[str, Any]:
        used = session.get_session_options()
        return {
            "threads_set": {"intra_op": used.intra_op_num_threads, "inter_op": used.inter_op_num_threads},
            "settings": settings,
            "ran_on": session.get_providers(),
        }

    return Model(lambda arrays: dict(zip(names, session.run(names, arrays), strict=True)), inputs, facts)


def _load_litert(path: str, threads: int, signature: str | None) -> Model:
    interpreter = _interpreter_class()(model_path=path, num_threads=threads)
    interpreter.allocate_tensors()  # hands the graph to XNNPACK; left to the first run, it would not count as loading
    signatures = interpreter.get_signature_list()
    if signature is None and signatures:
        signature = next(iter(signatures))
    if signature is not None and signature not in signatures:
        raise ValueError(f"no signature '{signature}'; this file has {', '.join(signatures) or 'none'}")

    if signature is not None:
        runner = interpreter.get_signature_runner(signature)
        details = runner.get_input_details()

        def run(arrays: Arrays) -> Arrays:
            return runner(**arrays)
    else:
        details = {item["name"]: item for item in interpreter.get_input_details()}
        outputs = {item["name"]: item["index"] for item in interpreter.get_output_details()}

        def run(arrays: Arrays) -> Arrays:
            for name, array in arrays.items():
                interpreter.set_tensor(details[name]["index"], array)
            interpreter.invoke()
            return {name: interpreter.get_tensor(index) for name, index in outputs.items()}

    def inputs() -> list[dict[str, Any]]:
        return [
            {"name": name, "shape": _tflite_shape(item), "dtype": np.dtype(item["dtype"]).name}
            for name, item in details.items()
        ]

    def facts() -> dict[str, Any]:
        return {"threads_set": {"num_threads": threads}, "settings": {}, "ran_on": _delegates(interpreter)}

    return Model(run, inputs, facts)


def _interpreter_class() -> Any:
    """LiteRT's Interpreter, or that of `tflite_runtime`, its former name, on an old board."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        from tflite_runtime.interpreter import Interpreter
    return Interpreter


def runtime_version(runtime: str) -> str:
    """Version of the installed runtime. Raises ImportError when there is none."""
    if runtime == "onnxruntime":
        return str(importlib.import_module("onnxruntime").__version__)
    _interpreter_class()
    module = sys.modules.get("ai_edge_litert") or sys.modules["tflite_runtime"]
    return str(getattr(module, "__version__", "unknown"))


def _delegates(interpreter: Any) -> list[str]:
    """What runs the graph. No public call says; after the first run the plan holds a DELEGATE op a partition."""
    operations = getattr(interpreter, "_get_ops_details", None)
    if operations is None:
        return ["unknown"]
    partitions = sum(item["op_name"] == "DELEGATE" for item in operations())
    return [f"XNNPACK ({partitions} partition{'s' * (partitions != 1)})"] if partitions else ["built-in kernels"]


def _warm_up(run: Callable[[], Any], limit_s: float) -> dict[str, Any]:
    """Runs until two consecutive windows' medians agree within 2 %, or `limit_s` has passed."""
    medians: list[float] = []
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < limit_s:
        window: list[float] = []
        while len(window) < WARM_UP_WINDOW_RUNS or sum(window) < WARM_UP_WINDOW_SECONDS:
            before = time.perf_counter()
            run()
            window.append(time.perf_counter() - before)
        runs += len(window)
        medians.append(statistics.median(window))
        if len(medians) > 1 and abs(medians[-1] - medians[-2]) <= WARM_UP_TOLERANCE * medians[-2]:
            return {"runs": runs, "steady": True, "medians_ms": [1e3 * value for value in medians]}
    return {"runs": runs, "steady": False, "medians_ms": [1e3 * value for value in medians]}


def _time_runs(
    run: Callable[[], Any], min_runs: int, max_runs: int, max_seconds: float
) -> tuple[list[float], list[float]]:
    """Wall and CPU milliseconds of each run: `min_runs` always, then more until `max_runs` or `max_seconds`."""
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    end = time.perf_counter() + max_seconds
    while len(wall_ms) < max_runs and (len(wall_ms) < min_runs or time.perf_counter() < end):
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        run()
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        wall_ms.append(wall / 1e6)
        cpu_ms.append(cpu / 1e6)
    return wall_ms, cpu_ms


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    try:
        with open("/proc/self/status") as status:  # unlike ru_maxrss, not inherited from the process that started us
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _count_threads() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _onnx_dtype(text: str) -> str:
    """`tensor(float)` → `float32`."""
    name = text.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def _tflite_shape(item: dict[str, Any]) -> list[int | str]:
    signature = item.get("shape_signature", item["shape"])
    return ["?" if free < 0 else int(size) for size, free in zip(item["shape"], signature, strict=True)]


def _read_arrays(path: str) -> Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _save_arrays(path: str, arrays: Arrays) -> None:
    """Numbers only: strings, sequences and maps (scikit-learn's ONNX files have them) would have to be pickled."""
    numbers = {name: array for name, array in arrays.items() if getattr(array, "dtype", np.dtype("O")).kind in "fiub"}
    np.savez(path, **numbers)  # type: ignore[arg-type]


def _keep_stdout_for_the_result() -> Any:
    """A stream on the real standard output; what a runtime's C++ code prints there goes to standard error instead."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def _stop_with_stdin() -> None:
    """Ends this process when its host is gone, killed or disconnected: a stray runner would disturb the next one."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def _one_line(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    if "wall_ms" not in result:
        return str(result["inputs"])
    median, runs = statistics.median(result["wall_ms"]), len(result["wall_ms"])
    return f"median {median:.3f} ms over {runs} runs, {result['threads_asked']} threads, on {result['ran_on'][0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="FILE")
    add("--runtime", required=True, choices=RUNTIMES)
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--signature", help="LiteRT: the signature to run; default: the first")
    add("--inputs", metavar="NPZ", help="an array for each input")
    add("--outputs", metavar="NPZ", help="where the first run's outputs go")
    add("--check", metavar="NPZ", help="other inputs, run once after the timed runs")
    add("--check-signature", metavar="NAME")
    add("--check-outputs", metavar="NPZ")
    add("--min-runs", type=int, default=20, help="default: %(default)s")
    add("--max-runs", type=int, default=200, help="default: %(default)s")
    add("--max-seconds", type=float, default=4.0, help="of timed runs; default: %(default)s")
    add("--warm-up-seconds", type=float, default=4.0, help="at most; default: %(default)s")
    add("--describe", action="store_true", help="name the inputs; time nothing")
    add("--stop-with-stdin", action="store_true", help="end when standard input closes")
    add("--json", action="store_true", help="one JSON object instead of a line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
