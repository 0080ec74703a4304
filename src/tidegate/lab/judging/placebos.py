"""Compare a variant with its placebos, which keep one side effect of its gate and remove the mechanism.

A mechanism helps if the variant is better than the baseline and better than its placebo. Both conditions must hold, so
the error rate is at most that of the more likely of the two errors, without a correction (intersection–union test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate._verdict import Effect
from tidegate.lab.judging.distributions import t_interval
from tidegate.lab.judging.judge import VariantResult
from tidegate.lab.judging.power import MIN_BLOCKS


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceboResult:
    """The comparison of a variant with one of its placebos."""

    placebo: str
    difference: float | None = None
    """The variant's mean minus the placebo's; None, like the interval, if a run diverged or seeds are too few."""
    low: float | None = None
    high: float | None = None
    """Ends of the paired t interval."""


def judge_placebo(
    own: Sequence[float | None], placebo: Sequence[float | None], *, name: str, confidence: float = 0.95
) -> PlaceboResult:
    """Compare a variant with the placebo of that name, seed by seed."""
    pairs = [(one, other) for one, other in zip(own, placebo, strict=True) if one is not None and other is not None]
    if len(pairs) < len(own) or len(pairs) < MIN_BLOCKS:
        return PlaceboResult(placebo=name)
    differences = [one - other for one, other in pairs]
    low, high = t_interval(differences, confidence)
    return PlaceboResult(placebo=name, difference=float(np.mean(differences)), low=low, high=high)


def effect_of(result: VariantResult, placebos: Sequence[PlaceboResult], *, lower_is_better: bool = True) -> Effect:
    """Return the effect of a variant's mechanism, from its result and those of its placebos."""
    signs = {side_of_zero(result.low, result.high), *(side_of_zero(placebo.low, placebo.high) for placebo in placebos)}
    if not placebos or len(signs) > 1 or signs == {0}:
        return "not shown"
    return "helps" if (signs == {-1}) == lower_is_better else "harms"


def side_of_zero(low: float | None, high: float | None) -> int:
    """Return the side of 0 on which an interval lies; 0 if it contains 0 or does not exist."""
    if low is None or high is None:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0
