"""Before the runs: which difference they will see, and how many seeds a given one needs."""

from __future__ import annotations

import math

import numpy as np

from tidegate.lab.judging.distributions import detectable_noncentrality, dunnett_critical_value
from tidegate.lab.judging.judge import MIN_BLOCKS, POWER, degrees_of_freedom

_MOST_SEEDS = 1_000


def detectable_difference(
    deviation: float, *, num_blocks: int, num_comparisons: int, confidence: float = 0.95
) -> float | None:
    """Return the difference that a comparison detects with 80 % power; None with too few seeds for a verdict.

    All variants are taken to spread alike.

    Args:
        deviation: Standard deviation of a variant's difference to the control between seeds.
        num_blocks: Seeds of each variant.
        num_comparisons: Variants beside the control, whose intervals hold at once.
        confidence: Of all intervals together.
    """
    if num_blocks < MIN_BLOCKS:
        return None
    degrees = degrees_of_freedom(np.ones(num_comparisons + 1), num_blocks)[0]
    critical = dunnett_critical_value(num_comparisons, degrees, confidence)
    return deviation / math.sqrt(num_blocks) * detectable_noncentrality(critical, degrees, POWER)


def seeds_needed(deviation: float, difference: float, *, num_comparisons: int, confidence: float = 0.95) -> int | None:
    """Return the fewest seeds that detect a difference with 80 % power; None if more than a thousand are needed."""
    for num_blocks in range(MIN_BLOCKS, _MOST_SEEDS + 1):
        seen = detectable_difference(
            deviation, num_blocks=num_blocks, num_comparisons=num_comparisons, confidence=confidence
        )
        if seen is not None and seen <= difference:
            return num_blocks
    return None
