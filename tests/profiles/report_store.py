"""A made-up store in the shapes that a sweep leaves: sizes × formats × threads, failures, and a second device."""

import hashlib
from pathlib import Path

from profiles.store import AccuracyKey, Cell, Measurement, Metric, Store

CHECKPOINT = "c" * 64
DATA = "d" * 64
SIZES = ("32", "64", "96")
N = 360
CORRECT = {"32": 330, "64": 353, "96": 354}  # of the checkpoint, of 360
LATENCY = {"onnx": {"32": 1.1, "64": 2.1, "96": 4.4}, "tflite": {"32": 0.9, "64": 1.9, "96": 4.0}}
GFLOP = {"32": 0.0131, "64": 0.0521, "96": 0.117}
SUFFIX = {"onnx": ".onnx", "tflite": ".tflite"}
CORE_ML_REASON = "checked here, not timed: needs an Apple device"
CIRCUMSTANCES = {
    "machine": {"cpu": "Example CPU at 2.5 GHz", "cores": 2, "memory_gb": 8.0},
    "os": "Linux 6.1",
    "python": "3.11.9",
    "versions": {"onnxruntime": "1.32.0", "ai-edge-litert": "2.3.0"},
    "protocol": {"processes": 3, "window": 50, "steady_within": 0.02},
    "warm_up_runs": 20,
    "started_at": "2026-01-02T03:04:05+00:00",
}


def sha256(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def wilson(correct: int, n: int = N) -> Metric:
    z, p = 1.959964, correct / n
    centre, scale = p + z * z / (2 * n), 1 + z * z / n
    half = z * ((p * (1 - p) + z * z / (4 * n)) / n) ** 0.5
    return Metric("accuracy", p, (centre - half) / scale, (centre + half) / scale, n)


def cell(file: str, size: str, fmt: str, threads: int = 1, device: str = "local", batch: int = 1) -> Cell:
    runtime = {"onnx": "onnxruntime", "tflite": "litert", "coreml": "coreml"}[fmt]
    return Cell(sha256(file), size, batch, runtime, "1.0", "cpu", threads, device, "build-1", 1)


def artifact(file: str, size: str, fmt: str) -> dict:
    precision = next((p for p in ("fp16", "int8", "int4") if p in file), "fp16" if fmt == "coreml" else "fp32")
    return {
        "name": file, "file": f"runs/demo/artifacts/{file}", "model": "mobilevit_xxs", "format": fmt,
        "precision": precision, "size_bytes": 5_200_000, "flops": int(GFLOP.get(size, 0.1) * 1e9),
        "parameters": 950_000, "source_sha256": CHECKPOINT,
    }  # fmt: skip


def summary(median: float, *, busy: float = 1.01) -> dict:
    return {
        "median_ms": median, "median_low_ms": median * 0.95, "median_high_ms": median * 1.08, "p90_ms": median * 1.2,
        "p99_ms": median * 1.5, "min_ms": median * 0.9, "cpu_median_ms": median / busy, "wall_per_cpu": busy,
        "load_ms": 31.0, "peak_memory_mb": 84.0, "samples": 300, "processes": 3,
    }  # fmt: skip


def timed(
    store: Store, file: str, size: str, fmt: str, median: float, *, threads: int = 1, device: str = "local",
    busy: float = 1.01, status: str = "ok", reason: str = "", machine: dict | None = None, batch: int = 1,
) -> Cell:  # fmt: skip
    key = cell(file, size, fmt, threads, device, batch)
    circumstances = CIRCUMSTANCES | ({"machine": machine} if machine else {})
    store.add_measurement(
        Measurement(key, status, artifact(file, size, fmt), reason, [], summary(median, busy=busy), circumstances)
    )
    return key


def add_accuracy(store: Store, sha: str, size: str, correct: int, *, data: str = DATA, split: str = "test") -> None:
    store.add_metric(AccuracyKey(sha, size, "cpu", data, split, 1.0), "digits", wilson(correct))


def make_store(path: Path) -> Store:
    """3 sizes × ONNX and TFLite × 1 and 2 threads; Core ML untimed; one failed, wrong or without accuracy; a phone."""
    store = Store(path)
    for size in SIZES:
        add_accuracy(store, CHECKPOINT, size, CORRECT[size])
        for fmt in ("onnx", "tflite"):
            file = f"mobilevit_xxs{SUFFIX[fmt]}"
            add_accuracy(store, sha256(file), size, CORRECT[size] - (size == "96" and fmt == "onnx"))
            for threads in (1, 2):
                timed(store, file, size, fmt, LATENCY[fmt][size] / (1 if threads == 1 else 1.5), threads=threads)
        package = f"mobilevit_xxs-{size}.mlpackage"
        add_accuracy(store, sha256(package), size, CORRECT[size])
        store.add_measurement(
            Measurement(
                cell(package, size, "coreml"),
                "not_run",
                artifact(package, size, "coreml"),
                CORE_ML_REASON,
                [],
                {},
                CIRCUMSTANCES,
            )
        )
    failed = "mobilevit_xxs-int4.tflite"
    store.add_measurement(
        Measurement(
            cell(failed, "64", "tflite"), "failed", artifact(failed, "64", "tflite"), "signal SIGSEGV after 0.3 s"
        )
    )
    wrong = "mobilevit_xxs-int8.tflite"
    add_accuracy(store, sha256(wrong), "96", 360)
    timed(store, wrong, "96", "tflite", 0.01, status="wrong_on_device", reason="golden output missed by 3.1 std")
    timed(store, "mobilevit_xxs-fp16.onnx", "64", "onnx", 0.5)  # fast, but nobody measured its accuracy
    phone = {"cpu": "Example phone", "cores": 8}
    for size in SIZES:
        timed(
            store, "mobilevit_xxs.tflite", size, "tflite", 3 * LATENCY["tflite"][size], device="adb://X1", machine=phone
        )
    return store
