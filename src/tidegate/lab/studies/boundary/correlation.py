"""The correlation of two figures of trials, with an interval that resamples whole seeds: within groups, or of means."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate._validation import InputError

Trials: TypeAlias = Sequence[tuple[Hashable, int, float, float]]
"""Group, seed and the two figures of each."""
_Statistic: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.float64]], float]

MIN_TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Pearson's r at one level, with a 95 % bootstrap interval over seeds."""

    among: str
    """Which trials, or means of trials."""
    count: int
    value: float
    low: float
    high: float


def correlate(among: str, trials: Trials, *, num_resamples: int = 2000) -> Correlation:
    """Correlate the two figures of (group, seed, one, other), each taken less its group's mean.

    Tasks differ in how hard they are and how much they bend; as groups their means are taken out. One group alone makes
    it the plain correlation. Trials of one seed go together into a resample, because they share data and initial
    weights.
    """
    return _correlate(among, trials, len(trials), _within_groups, num_resamples)


def correlate_means(among: str, trials: Trials, *, num_resamples: int = 2000) -> Correlation:
    """Correlate the groups' means of the two figures of (group, seed, one, other); groups are not resampled."""
    return _correlate(among, trials, len({group for group, *_ in trials}), _of_means, num_resamples)


def _correlate(among: str, trials: Trials, count: int, statistic: _Statistic, num_resamples: int) -> Correlation:
    if count < MIN_TRIALS:
        raise InputError("trials", expected=f"at least {MIN_TRIALS} trials or groups", got=count)
    groups = sorted({str(group) for group, *_ in trials})
    place = np.array([groups.index(str(group)) for group, *_ in trials])
    seeds = np.array([seed for _, seed, *_ in trials])
    figures = np.array([figures for _, _, *figures in trials], dtype=np.float64)
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds)]
    resampled: list[float] = []
    for _ in range(num_resamples):
        chosen = np.concatenate([rows[index] for index in rng.integers(0, len(rows), len(rows))])
        resampled.append(statistic(place[chosen], figures[chosen]))
    low, high = np.nanquantile(resampled, [0.025, 0.975]).tolist()
    return Correlation(among=among, count=count, value=statistic(place, figures), low=low, high=high)


def _within_groups(groups: NDArray[np.int64], figures: NDArray[np.float64]) -> float:
    return _pearson(figures - _means(groups, figures)[groups])


def _of_means(groups: NDArray[np.int64], figures: NDArray[np.float64]) -> float:
    means = _means(groups, figures)[np.unique(groups)]
    return _pearson(means - means.mean(axis=0))


def _means(groups: NDArray[np.int64], figures: NDArray[np.float64]) -> NDArray[np.float64]:
    counts = np.maximum(np.bincount(groups), 1)
    return np.stack([np.bincount(groups, weights=column) / counts for column in figures.T], axis=1)


def _pearson(centred: NDArray[np.float64]) -> float:
    size = np.sqrt((centred**2).sum(axis=0).prod())
    return float(centred.prod(axis=1).sum() / size) if size > 0 else float("nan")
