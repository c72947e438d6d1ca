"""What a measured file is given, and whether what it returned is right."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from converters.artifact import RUNTIMES, Metadata, format_of
from converters.errors import EdgeVitError
from converters.run import open_artifact
from converters.signature import Size, TensorSpec
from profiles.devices import local

# Largest |output - golden| / std(golden) of a device that computes the file rightly. Wider than export's own limits:
# another CPU's kernels may add up in another order.
GOLDEN_TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
GOLDEN_TOLERANCE_QUANTISED = 0.5
UNREADABLE = (OSError, ValueError, zipfile.BadZipFile)  # what `read_arrays` raises


@dataclass(frozen=True)
class Target:
    """A file at a size. `metadata` is None for a file that this project did not write."""

    path: Path
    format: str
    size: Size | None
    metadata: Metadata | None
    unchecked_because: str = ""

    @property
    def runtime(self) -> str:
        return RUNTIMES[self.format]

    @property
    def batch(self) -> int:
        return self.metadata.batch if self.metadata and isinstance(self.metadata.batch, int) else 1

    def signature(self, size: str | None) -> str | None:
        """Name of the TFLite signature of `size`; None: the file's first."""
        return Size.parse(size).entry_point if self.metadata and self.format == "tflite" and size else None


@dataclass(frozen=True)
class Inputs:
    """What the timed runs get, and what the outputs are compared with (`golden`: name → array, or None)."""

    timed: dict[str, np.ndarray]
    golden: dict[str, np.ndarray] | None
    check: dict[str, np.ndarray] | None  # golden inputs of another size than the timed ones
    check_signature: str | None


class CannotRunError(Exception):
    """The runner could not even describe the file; becomes the measurement's reason."""


def open_target(path: Path, size: Size | None) -> Target:
    format = format_of(path)
    try:
        metadata = open_artifact(path).metadata
    except EdgeVitError as error:
        return Target(path, format, size, None, str(error))
    if size is not None and str(size) not in metadata.sizes:
        offered = ", ".join(metadata.sizes)
        raise EdgeVitError(f"{path}: size {size} is not in the file, which has {offered}; export it with that size")
    if size is None:
        preferred = metadata.preprocessing.size if metadata.preprocessing else ""
        size = Size.parse(preferred if preferred in metadata.sizes else metadata.sizes[0])
    why = "" if metadata.golden else "the file carries no golden output"
    return Target(path, format, size, metadata, why)


def sizes_of(path: Path) -> tuple[Size, ...] | tuple[None]:
    """Every size that a file offers; `(None,)` for a file that does not say. Raises EdgeVitError for a wrong path."""
    metadata = open_target(path, None).metadata
    return tuple(Size.parse(size) for size in metadata.sizes) if metadata else (None,)


def make_inputs(target: Target, time_limit_s: float) -> Inputs:
    """Golden inputs where they are of this size, else seeded ones; golden ones of another size are run for the check.

    Raises CannotRunError when a foreign file's inputs cannot be read, or EdgeVitError when they need a size.
    """
    if target.metadata is None:
        return Inputs(_foreign_inputs(target, time_limit_s), None, None, None)
    assert target.size is not None
    specs = target.metadata.signature.inputs
    rng = np.random.default_rng(0)
    seeded = {
        spec.name: _realistic(replace(spec, shape=spec.resolve(target.size, target.batch)), rng) for spec in specs
    }
    golden = target.metadata.golden
    if golden is None:
        return Inputs(seeded, None, None, None)
    if {name: array.shape for name, array in golden.inputs.items()} == {n: a.shape for n, a in seeded.items()}:
        return Inputs(golden.inputs, golden.outputs, None, None)
    return Inputs(seeded, golden.outputs, golden.inputs, target.signature(golden.size))


def _foreign_inputs(target: Target, time_limit_s: float) -> dict[str, np.ndarray]:
    """Seeded inputs of the shapes that the runner, in a process of its own, reads out of the file."""
    answer = local.run(local.RunSpec(target.path, target.runtime, ("--describe",), time_limit_s))
    if "error" in answer:
        raise CannotRunError(answer["error"])
    rng = np.random.default_rng(0)
    shapes = {item["name"]: _fill_in(item["shape"], target.size) for item in answer["inputs"]}
    for item in answer["inputs"]:
        if shapes[item["name"]] is None:
            free = "x".join(str(dim) for dim in item["shape"])
            raise EdgeVitError(f"{target.path}: input '{item['name']}' has free dimensions ({free}); give its size")
    if target.size and all(isinstance(dim, int) for item in answer["inputs"] for dim in item["shape"][1:]):
        raise EdgeVitError(f"{target.path}: its input shapes are fixed; leave the size out")
    return {
        item["name"]: _realistic(_guessed_spec(item["name"], shapes[item["name"]] or (), item["dtype"]), rng)
        for item in answer["inputs"]
    }


def _fill_in(shape: list[int | str | None], size: Size | None) -> tuple[int, ...] | None:
    """A foreign file's shape made concrete: batch 1, then the size's values in order; None when they do not suffice."""
    values = [value for _, value in size.dims] if size else []
    if shape and not isinstance(shape[0], int):
        values = [1, *values]
    filled = [dim if isinstance(dim, int) else (values.pop(0) if values else None) for dim in shape]
    return None if None in filled else tuple(int(dim) for dim in filled if dim is not None)


def _guessed_spec(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(name, shape, dtype, "image" if len(shape) == 4 else "values")


def _realistic(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Values in the range that a real input has: all-zero pictures run faster than real ones on some kernels."""
    dtype, shape = np.dtype(spec.dtype), tuple(int(dim) for dim in spec.shape)
    if spec.meaning == "mask":
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 256 if spec.meaning == "image" and dtype.itemsize == 1 else 100, shape).astype(dtype)
    if spec.meaning == "image":
        return rng.random(shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def judge(
    outputs: dict[str, np.ndarray],
    checked: dict[str, np.ndarray],
    golden: dict[str, np.ndarray] | None,
    precision: str,
) -> tuple[float | None, str]:
    """Worst |output − golden| / std(golden), and why the outputs are wrong ("" if they are not)."""
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            return None, f"output '{name}' holds values that are not finite"
    if golden is None:
        return None, ""
    tolerance = GOLDEN_TOLERANCE.get(precision, GOLDEN_TOLERANCE_QUANTISED)
    worst = 0.0
    for name, expected in golden.items():
        actual = checked.get(name)
        if actual is None or actual.shape != expected.shape:
            return None, f"output '{name}' should be {expected.shape}, is {None if actual is None else actual.shape}"
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()
        error = float(difference / max(float(expected.std()), 1e-12))
        worst = max(worst, error)
        if not error <= tolerance:
            return error, f"output '{name}' is {error:.2g} of its std from the golden output; at most {tolerance:g}"
    return worst, ""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
