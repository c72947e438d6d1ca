"""A measurement's figures from the runs of its processes, with intervals that see the spread between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
_CHUNK_VALUES = 4_000_000  # values that one step of the bootstrap holds in memory


def summarise(processes: Sequence[dict[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Figures of one measurement from what the runner printed in each of its processes.

    Percentiles are over the runs of all processes together, untrimmed, with linear interpolation between order
    statistics (numpy's default, Hyndman and Fan's type 7). `median_low_ms` and `median_high_ms` are the 95 % interval
    of `hierarchical_bootstrap`. `wall_per_cpu` is total wall time over total CPU time (all threads): on a quiet machine
    near 1 with one thread, below 1 with several; above 1 the process waited. `load_ms` is the median process's,
    `peak_memory_mb` the largest.
    """
    walls = [np.asarray(process["wall_ms"], np.float64) for process in processes]
    wall = np.concatenate(walls)
    cpu = np.concatenate([np.asarray(process["cpu_ms"], np.float64) for process in processes])
    low, high = hierarchical_bootstrap(walls, seed=seed)
    median, p90, p99 = np.percentile(wall, [50, 90, 99])
    return {
        "median_ms": float(median),
        "median_low_ms": low,
        "median_high_ms": high,
        "p90_ms": float(p90),
        "p99_ms": float(p99),
        "min_ms": float(wall.min()),
        "cpu_median_ms": float(np.median(cpu)),
        "wall_per_cpu": float(wall.sum() / cpu.sum()) if cpu.sum() else None,
        "load_ms": float(np.median([process["load_ms"] for process in processes])),
        "peak_memory_mb": float(max(process["peak_memory_mb"] for process in processes)),
        "samples": len(wall),
        "processes": len(processes),
    }


def hierarchical_bootstrap(
    groups: Sequence[np.ndarray], *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the median of all runs: resample processes, then the runs of each drawn process.

    `groups` holds one array of runs a process; their lengths may differ. Runs of one process resemble each other more
    than those of another, so resampling runs alone would give an interval that the next process falls out of. With few
    processes it is still narrow: three cannot show how far a fourth may lie (docs/profiling.md has the coverage).
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([len(group) for group in groups])
    longest = lengths.max()
    padded = np.full((len(groups), longest), np.inf)  # (P, R); infinity sorts behind every run
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = group

    step = max(1, _CHUNK_VALUES // padded.size)
    medians = [
        _resampled_medians(padded, lengths, min(step, resamples - start), rng) for start in range(0, resamples, step)
    ]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(np.concatenate(medians), [tail, 100 - tail])
    return float(low), float(high)


def _resampled_medians(padded: np.ndarray, lengths: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """(resamples,) medians. Every drawn process gives as many draws of its runs as it has runs."""
    count, longest = padded.shape
    drawn = rng.integers(count, size=(resamples, count))  # (B, P): which processes
    drawn_lengths = lengths[drawn][..., None]  # (B, P, 1)
    runs = (rng.random((resamples, count, longest)) * drawn_lengths).astype(np.intp)  # (B, P, R): which runs of each
    values = padded[drawn[..., None], runs]
    values[np.arange(longest) >= drawn_lengths] = np.inf
    values = np.sort(values.reshape(resamples, -1), axis=1)
    total = drawn_lengths.sum(axis=(1, 2))
    rows = np.arange(resamples)
    return (values[rows, (total - 1) // 2] + values[rows, total // 2]) / 2
