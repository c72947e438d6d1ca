"""Figures against scipy, and the interval against simulated processes whose truth is known."""

import numpy as np
import pytest
import scipy.stats

from profiles.statistics import hierarchical_bootstrap, summarise


def processes(seed=0, counts=(40, 25, 60)):
    rng = np.random.default_rng(seed)
    return [
        {
            "wall_ms": list(rng.gamma(9, 1, count)),
            "cpu_ms": list(rng.gamma(8, 1, count)),
            "load_ms": 10.0 * n,
            "peak_memory_mb": 100.0 + n,
        }
        for n, count in enumerate(counts, 1)
    ]


def test_figures_are_those_of_all_runs_together():
    given = processes()
    wall = np.concatenate([item["wall_ms"] for item in given])
    cpu = np.concatenate([item["cpu_ms"] for item in given])
    summary = summarise(given)
    # scipy's (alphap, betap) = (1, 1) is the definition that `summarise` states: Hyndman and Fan's type 7.
    expected = scipy.stats.mstats.mquantiles(wall, [0.5, 0.9, 0.99], alphap=1, betap=1)
    assert [summary[name] for name in ("median_ms", "p90_ms", "p99_ms")] == pytest.approx(list(expected))
    assert summary["min_ms"] == wall.min()
    assert summary["cpu_median_ms"] == pytest.approx(float(np.median(cpu)))
    assert summary["wall_per_cpu"] == pytest.approx(wall.sum() / cpu.sum())
    assert (summary["load_ms"], summary["peak_memory_mb"]) == (20.0, 103.0)
    assert (summary["samples"], summary["processes"]) == (125, 3)
    assert summary["median_low_ms"] < summary["median_ms"] < summary["median_high_ms"]


def test_no_cpu_time_gives_no_ratio():
    given = [item | {"cpu_ms": [0.0]} for item in processes()]
    assert summarise(given)["wall_per_cpu"] is None


def test_the_same_runs_give_the_same_interval():
    assert summarise(processes()) == summarise(processes())


def coverage(processes, runs, between, trials=150):
    """Share of simulated measurements whose interval holds the true median, 0."""
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(trials):
        groups = [between * rng.standard_normal() + rng.standard_normal(runs) for _ in range(processes)]
        low, high = hierarchical_bootstrap(groups, resamples=300, seed=trial)
        hits += low <= 0 <= high
    return hits / trials


@pytest.mark.parametrize(
    ("count", "between", "at_least"),
    [
        (12, 1.0, 0.87),  # processes differ as much as runs do
        (12, 0.0, 0.93),  # processes do not differ
        (3, 1.0, 0.68),  # what docs/profiling.md says of three processes
    ],
)
def test_the_interval_covers_the_true_median(count, between, at_least):
    assert coverage(count, 30, between) >= at_least


def test_one_process_resampled_is_scipys_bootstrap_of_the_median():
    runs = np.random.default_rng(5).gamma(9, 1, 80)
    theirs = scipy.stats.bootstrap((runs,), np.median, n_resamples=4000, method="percentile", rng=0).confidence_interval
    ours = hierarchical_bootstrap([runs], resamples=4000)
    assert ours == pytest.approx((theirs.low, theirs.high), rel=0.02)


def test_resampling_sees_the_spread_between_processes():
    rng = np.random.default_rng(0)
    groups = [centre + 0.1 * rng.standard_normal(50) for centre in (57.0, 66.0, 76.0)]
    low, high = hierarchical_bootstrap(groups)
    assert low < 58
    assert high > 75
    pooled_low, pooled_high = hierarchical_bootstrap([np.concatenate(groups)])
    assert high - low > 3 * (pooled_high - pooled_low) / 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_of_different_lengths_count_by_their_runs(order):
    groups = [np.full(10, 1.0), np.full(10, 2.0), np.full(200, 3.0)]
    low, high = hierarchical_bootstrap([groups[n] for n in order], resamples=500)
    assert (low, high) == (1.0, 3.0)
    assert np.isfinite([low, high]).all()
