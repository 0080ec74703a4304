"""Estimate rates: the slope of a log error in the log sample size, its interval, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tidegate._validation import InputError, require_choice
from tidegate.experts.estimate import METRICS, RateData
from tidegate.experts.layers import Floats

Verdict: TypeAlias = Literal["identified", "not identified", "inconclusive"]

_FLAT = -0.2
"""Errors fall if the interval of the slope lies below, and are flat if it lies above."""
_CONVERGED = 0.9
_SPREAD = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The rate at which an error falls with the sample size."""

    metric: str
    slope: float
    """Slope of the log of the error's quantile in log n."""
    interval: tuple[float, float]
    """95 % bootstrap interval over replicates; it does not cover other truths, designs or optimizers."""
    verdict: Verdict
    reasons: tuple[str, ...]
    """Reasons for the verdict."""
    ns: tuple[int, ...]
    """Sample sizes used."""
    converged: float
    """Share of converged fits at the worst sample size."""
    spread_ratio: float
    """Median spread between starts over the median error at the largest size; infinite if most starts failed."""


def estimate_rate(
    data: RateData,
    metric: str = "expert",
    *,
    n_min: int = 1000,
    quantile: float = 0.5,
    resamples: int = 1000,
    seed: int = 0,
) -> Rate:
    """Estimate the slope of one error, and judge whether its quantity is identified.

    *identified* requires an interval below -0.2, at least 90 % converged fits at every size, and a shrinking spread of
    starts: at the largest n below a tenth of the error, or falling at least as fast as n to the -0.2. *not identified*
    requires an interval above -0.2 and the same share of converged fits. Otherwise the verdict is *inconclusive*.

    Args:
        data: Data of an experiment.
        metric: One of `METRICS`.
        n_min: Minimum sample size.
        quantile: Quantile of the error over replicates.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
    """
    require_choice("metric", metric, METRICS)
    used = np.array([n >= n_min for n in data.ns])
    if used.sum() < 3:
        raise InputError("n_min", expected="at most the third largest sample size, for a slope", got=n_min)
    ns, errors = np.array(data.ns)[used], data.errors[metric][used]
    if np.any(np.quantile(errors, quantile, axis=1) <= 0):
        raise InputError("metric", expected="an error above 0 at every size", got=metric)
    slope = float(_slope(ns, np.quantile(errors, quantile, axis=1)))
    interval = _bootstrap(ns, errors, quantile, resamples, np.random.default_rng(seed))
    converged = float(np.min(np.mean(data.converged[used], axis=(1, 2))))
    # Without an equally good second start the spread of a replicate is infinite.
    spread = data.start_spread[metric if metric in ("regression", "scores") else "expert"][used]
    spreads = np.median(np.where(np.isnan(spread), np.inf, spread), axis=1)
    ratio = float(spreads[-1] / np.median(errors[-1]))
    falls = np.all(np.isfinite(spreads)) and _slope(ns, np.maximum(spreads, np.finfo(np.float64).tiny)) < _FLAT
    shrinks = ratio < _SPREAD or bool(falls)
    verdict, reasons = _judge(interval, converged, shrinks)
    return Rate(
        metric=metric,
        slope=slope,
        interval=interval,
        verdict=verdict,
        reasons=reasons,
        ns=tuple(int(n) for n in ns),
        converged=converged,
        spread_ratio=ratio,
    )


def _judge(interval: tuple[float, float], converged: float, shrinks: bool) -> tuple[Verdict, tuple[str, ...]]:
    falls, flat = interval[1] < _FLAT, interval[0] > _FLAT
    reasons = [f"the slope's interval is [{interval[0]:.3f}, {interval[1]:.3f}]"]
    if converged < _CONVERGED:
        reasons.append(f"only {converged:.0%} of the fits converged")
        return "inconclusive", tuple(reasons)
    if falls and not shrinks:
        reasons.append("equally good fits from different starts do not converge to each other")
        return "inconclusive", tuple(reasons)
    return ("identified" if falls else "not identified" if flat else "inconclusive"), tuple(reasons)


def _bootstrap(
    ns: Floats, errors: Floats, quantile: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval; replicates are resampled independently at each size."""
    sizes, replicates = errors.shape
    picks = rng.integers(replicates, size=(resamples, sizes, replicates))
    drawn = np.take_along_axis(np.broadcast_to(errors, (resamples, sizes, replicates)), picks, axis=2)
    slopes = _slope(ns, np.quantile(drawn, quantile, axis=2))
    low, high = np.quantile(slopes, (0.025, 0.975))
    return float(low), float(high)


def _slope(ns: Floats, errors: Floats) -> Floats:
    """Return least-squares slopes on logarithms of errors (..., sizes)."""
    steps = np.log(ns) - np.mean(np.log(ns))
    return np.log(errors) @ steps / np.sum(steps**2)
