"""The precision of a comparison: degrees of freedom, minimum detectable effect, and the seeds that an effect needs."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from tidegate.lab.judging.distributions import Array, detectable_noncentrality, dunnett_critical_value

MIN_BLOCKS = 3
"""With fewer seeds, there is no verdict."""
POWER = 0.8
"""Probability of detecting a difference as large as the minimum detectable effect."""
_MOST_SEEDS = 1_000


def too_few_seeds(number: int) -> str:
    """Return why a number of seeds below `MIN_BLOCKS` gives no verdict."""
    return f"a verdict needs at least {MIN_BLOCKS} seeds, got {number}"


def degrees_of_freedom(variances: Array, num_seeds: int) -> list[float]:
    r"""Return Satterthwaite's degrees of freedom of each difference's variance, rounded down to a tenth.

    The variance is a quadratic form $\sum_u w_u r_u^2$ of the residuals of a seed, whose covariance is
    $M = C \operatorname{diag}(\tilde s^2) C$ with the centering matrix C: $\nu = (S-1) \operatorname{tr}(WM)^2 /
    \operatorname{tr}(WMWM)$. Rounding keeps the critical values few enough to cache.

    Args:
        variances: Of each variant's residuals, the baseline first.
        num_seeds: Seeds of each variant.
    """
    num_variants = len(variances)
    centering = np.eye(num_variants) - 1 / num_variants
    covariance = centering @ (variances[:, None] * centering)
    weights = np.full((num_variants, num_variants), 2 / (num_variants * num_seeds))
    weights += (num_seeds - 1) / num_seeds * np.eye(num_variants)
    weights[:, 0] += (num_seeds - 1) / num_seeds
    weights = weights[1:]
    degrees = (weights @ np.diag(covariance)) ** 2 / (weights @ covariance**2 * weights).sum(axis=1)
    return [math.floor(10 * (num_seeds - 1) * each + 1e-6) / 10 for each in degrees.tolist()]


def detectable_difference(
    deviation: float, *, num_blocks: int, num_comparisons: int, confidence: float = 0.95
) -> float | None:
    """Return the difference that a comparison detects with 80 % power; None with too few seeds for a verdict.

    All variants are assumed to have equal variance.

    Args:
        deviation: Standard deviation between seeds of a variant's difference from the baseline.
        num_blocks: Seeds of each variant.
        num_comparisons: Variants besides the baseline, whose intervals hold simultaneously.
        confidence: Of all intervals together.
    """
    if num_blocks < MIN_BLOCKS:
        return None
    degrees = degrees_of_freedom(np.ones(num_comparisons + 1), num_blocks)[0]
    critical = dunnett_critical_value(num_comparisons, degrees, confidence)
    return deviation / math.sqrt(num_blocks) * detectable_noncentrality(critical, degrees, POWER)


def seeds_needed(deviation: float, difference: float, *, num_comparisons: int, confidence: float = 0.95) -> int | None:
    """Return the fewest seeds that detect a difference with 80 % power; None if more than a thousand are needed."""

    def detects(num_blocks: int) -> bool:
        detectable = detectable_difference(
            deviation, num_blocks=num_blocks, num_comparisons=num_comparisons, confidence=confidence
        )
        return detectable is not None and detectable <= difference

    counts = range(MIN_BLOCKS, _MOST_SEEDS + 1)
    place = bisect_left(counts, True, key=detects)
    return counts[place] if place < len(counts) else None
