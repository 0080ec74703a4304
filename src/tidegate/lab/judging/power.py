"""Before the runs: which difference they will see, and how many seeds a given one needs."""

from __future__ import annotations

import math

from tidegate.lab.judging.distributions import (
    detectable_noncentrality,
    dunnett_critical_value,
    student_critical_value,
)
from tidegate.lab.judging.judge import MIN_BLOCKS, POWER

_MOST_SEEDS = 1_000


def detectable_difference(
    deviation: float, *, num_blocks: int, num_comparisons: int, confidence: float = 0.95, pooled: bool = True
) -> float | None:
    """Return the difference that a comparison detects with 80 % power; None with too few seeds for a verdict.

    Args:
        deviation: Standard deviation of a variant's difference to the control between seeds.
        num_blocks: Seeds of each variant.
        num_comparisons: Variants beside the control, whose intervals hold at once.
        confidence: Of all intervals together.
        pooled: Whether the noise is estimated from the runs of all variants, as if spreads are equal, or from each
            variant's own pairs.
    """
    if num_blocks < MIN_BLOCKS:
        return None
    if pooled:
        degrees = num_comparisons * (num_blocks - 1)
        critical = dunnett_critical_value(num_comparisons, degrees, confidence)
    else:
        degrees = num_blocks - 1
        critical = student_critical_value(degrees, (1 - confidence) / num_comparisons)
    return deviation / math.sqrt(num_blocks) * detectable_noncentrality(critical, degrees, POWER)


def seeds_needed(
    deviation: float, difference: float, *, num_comparisons: int, confidence: float = 0.95, pooled: bool = True
) -> int | None:
    """Return the fewest seeds that detect a difference with 80 % power; None if more than a thousand are needed."""
    for num_blocks in range(MIN_BLOCKS, _MOST_SEEDS + 1):
        seen = detectable_difference(
            deviation, num_blocks=num_blocks, num_comparisons=num_comparisons, confidence=confidence, pooled=pooled
        )
        if seen is not None and seen <= difference:
            return num_blocks
    return None
