"""Correlate two metrics of trials within groups or over group means, with a bootstrap interval over whole seeds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate._validation import InputError

Trials: TypeAlias = Sequence[tuple[Hashable, int, float, float]]
"""Group, seed and the two metrics of each trial."""

MIN_TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Pearson's r at one level, with a 95 % bootstrap interval over seeds."""

    among: str
    """Name of the trials, or of their means."""
    count: int
    value: float
    low: float
    high: float


def correlate(among: str, trials: Trials, *, of_means: bool = False, num_resamples: int = 2000) -> Correlation:
    """Correlate the two metrics of trials, each with its group and seed.

    Tasks differ in difficulty and in curvature; with tasks as groups, their means are subtracted. A single group gives
    the plain correlation. Trials of one seed are resampled together, because they share data and initial weights. With
    `of_means` the groups' means are correlated instead of the deviations from them, and groups are not resampled.
    """
    count = len({group for group, *_ in trials}) if of_means else len(trials)
    if count < MIN_TRIALS:
        raise InputError("trials", expected=f"at least {MIN_TRIALS} trials or groups", got=count)
    groups = sorted({str(group) for group, *_ in trials})
    place = np.array([groups.index(str(group)) for group, *_ in trials])
    seeds = np.array([seed for _, seed, *_ in trials])
    metrics = np.array([metrics for _, _, *metrics in trials], dtype=np.float64)
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    resampled: list[float] = []
    for _ in range(num_resamples):
        chosen = np.concatenate([rows[index] for index in rng.integers(0, len(rows), len(rows))])
        resampled.append(_pearson(place[chosen], metrics[chosen], of_means=of_means))
    low, high = np.nanquantile(resampled, [0.025, 0.975]).tolist()
    value = _pearson(place, metrics, of_means=of_means)
    return Correlation(among=among, count=count, value=value, low=low, high=high)


def _pearson(groups: NDArray[np.int64], metrics: NDArray[np.float64], *, of_means: bool) -> float:
    counts = np.maximum(np.bincount(groups), 1)
    means = np.stack([np.bincount(groups, weights=column) / counts for column in metrics.T], axis=1)
    if of_means:
        present = means[np.unique(groups)]
        centered = present - present.mean(axis=0)
    else:
        centered = metrics - means[groups]
    size = np.sqrt((centered**2).sum(axis=0).prod())
    return float(centered.prod(axis=1).sum() / size) if size > 0 else float("nan")
