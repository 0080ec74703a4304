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
    statistic = _of_means if of_means else _within_groups
    groups = sorted({str(group) for group, *_ in trials})
    place = np.array([groups.index(str(group)) for group, *_ in trials])
    seeds = np.array([seed for _, seed, *_ in trials])
    metrics = np.array([metrics for _, _, *metrics in trials], dtype=np.float64)
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    resampled: list[float] = []
    for _ in range(num_resamples):
        chosen = np.concatenate([rows[index] for index in rng.integers(0, len(rows), len(rows))])
        resampled.append(statistic(place[chosen], metrics[chosen]))
    low, high = np.nanquantile(resampled, [0.025, 0.975]).tolist()
    return Correlation(among=among, count=count, value=statistic(place, metrics), low=low, high=high)


def _within_groups(groups: NDArray[np.int64], metrics: NDArray[np.float64]) -> float:
    return _pearson(metrics - _means(groups, metrics)[groups])


def _of_means(groups: NDArray[np.int64], metrics: NDArray[np.float64]) -> float:
    means = _means(groups, metrics)[np.unique(groups)]
    return _pearson(means - means.mean(axis=0))


def _means(groups: NDArray[np.int64], metrics: NDArray[np.float64]) -> NDArray[np.float64]:
    counts = np.maximum(np.bincount(groups), 1)
    return np.stack([np.bincount(groups, weights=column) / counts for column in metrics.T], axis=1)


def _pearson(centered: NDArray[np.float64]) -> float:
    size = np.sqrt((centered**2).sum(axis=0).prod())
    return float(centered.prod(axis=1).sum() / size) if size > 0 else float("nan")
