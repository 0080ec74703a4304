"""The correlation of two figures of trials in blocks, with an interval that resamples whole seeds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Pearson's r, each figure taken less its task's mean, with a 95 % bootstrap interval over seeds."""

    among: str
    """Which trials."""
    count: int
    value: float
    low: float
    high: float


def correlate(
    among: str, trials: Sequence[tuple[Hashable, int, float, float]], *, num_resamples: int = 2000
) -> Correlation:
    """Correlate the two figures of (task, seed, one, other) within tasks.

    Tasks differ in how hard they are and how much they bend; their means are taken out. Trials of one seed go together
    into a resample, because they share data and initial weights.
    """
    if len(trials) < MIN_TRIALS:
        raise ValueError(f"a correlation needs at least three trials; got {len(trials)}.")
    tasks = sorted({str(task) for task, *_ in trials})
    place = np.array([tasks.index(str(task)) for task, *_ in trials])
    seeds = np.array([seed for _, seed, *_ in trials])
    figures = np.array([figures for _, _, *figures in trials], dtype=np.float64)
    rng = np.random.default_rng(0)
    known = np.unique(seeds)
    rows = [np.flatnonzero(seeds == seed) for seed in known]
    resampled = [
        _correlation_of(
            np.concatenate([rows[index] for index in rng.integers(0, len(rows), len(rows))]), place, figures
        )
        for _ in range(num_resamples)
    ]
    low, high = np.nanquantile(resampled, [0.025, 0.975]).tolist()
    return Correlation(
        among=among,
        count=len(trials),
        value=_correlation_of(np.arange(len(trials)), place, figures),
        low=low,
        high=high,
    )


def _correlation_of(rows: NDArray[np.intp], place: NDArray[np.int64], figures: NDArray[np.float64]) -> float:
    chosen, groups = figures[rows], place[rows]
    counts = np.maximum(np.bincount(groups), 1)
    means = np.stack([np.bincount(groups, weights=column) / counts for column in chosen.T], axis=1)
    left = chosen - means[groups]
    size = np.sqrt((left**2).sum(axis=0).prod())
    return float(left.prod(axis=1).sum() / size) if size > 0 else float("nan")
