"""How often the whole procedure, tuning included, finds a difference: where there is none, and where there is one.

Comparisons are drawn from losses of real runs: of every variant at every setting under many seeds. What the variants
differ by on average is taken out at each setting; how far their runs scatter, and how alike those of one seed are,
stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy import special

from tidegate.lab.judging.distributions import Array
from tidegate.lab.judging.judge import MIN_BLOCKS, fit_table

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What came of many comparisons without a difference, and of as many with one."""

    num_comparisons: int
    num_alarms: int
    """Comparisons without a difference in which an interval excludes 0."""
    num_seen: int
    """Comparisons in which the one variant that differs is told apart on the right side."""

    @property
    def alarm_rate(self) -> float:
        """Share of false alarms."""
        return self.num_alarms / self.num_comparisons

    @property
    def alarm_limit(self) -> float:
        """What the true rate lies below with 95 % confidence (Clopper and Pearson)."""
        missed = self.num_comparisons - self.num_alarms
        return 1.0 if not missed else float(special.betaincinv(self.num_alarms + 1, missed, 0.95))

    @property
    def power(self) -> float:
        """Share of the comparisons with a difference in which it is seen."""
        return self.num_seen / self.num_comparisons


def calibrate(
    losses: Array,
    *,
    num_blocks: int = 5,
    num_comparisons: int = 4_000,
    effect: float = 0.01,
    flip_signs: bool = False,
    seed: int = 0,
) -> Calibration:
    """Draw comparisons from recorded losses, tune each variant inside its blocks, and judge.

    Each comparison takes seeds that it has not taken yet: some to tune on, as many to compare on. In every block a
    variant is compared at the setting that was best for it on the block's tuning seed.

    losses     : (variant, setting, seed) of real runs, the control first; finite
    effect     : share of the mean loss by which the first variant after the control is better, for the power
    flip_signs : flip the sign of all that scatters under a seed, or not, by chance. Deviations from a mean of few seeds
                 add up to 0, which makes alarms rarer; flipped ones do not, but they are symmetric
    """
    losses = np.asarray(losses, dtype=np.float64)
    _require(losses, num_blocks, num_comparisons)
    generator = np.random.default_rng(seed)
    num_seeds = losses.shape[2]
    surface = losses.mean(axis=(0, 2))
    scatter = (losses - losses.mean(axis=2, keepdims=True)) * np.sqrt(num_seeds / (num_seeds - 1))
    shift = np.zeros((losses.shape[0], 1))
    shift[1] = effect * surface.mean()
    alarms = seen = 0
    for _ in range(num_comparisons):
        table = _draw_table(surface, scatter, num_blocks, generator, flip_signs=flip_signs)
        alarms += any(sign for sign in _signs(table))
        seen += _signs(table - shift)[0] < 0
    return Calibration(num_comparisons=num_comparisons, num_alarms=alarms, num_seen=seen)


def _require(losses: Array, num_blocks: int, num_comparisons: int) -> None:
    if losses.ndim != 3 or losses.shape[0] < 2 or not np.isfinite(losses).all():
        raise ValueError(
            "losses must be finite, of shape (variant, setting, seed), with at least two variants; got shape "
            f"{losses.shape}."
        )
    if num_blocks < MIN_BLOCKS or losses.shape[2] < 2 * num_blocks or num_comparisons < 1:
        raise ValueError(
            f"num_blocks must be at least {MIN_BLOCKS}, with two seeds for each, and num_comparisons at least 1; got "
            f"{num_blocks} blocks, {losses.shape[2]} seeds and {num_comparisons}."
        )


def _draw_table(surface: Array, scatter: Array, num_blocks: int, generator: Generator, *, flip_signs: bool) -> Array:
    """The losses (variant, block) of one comparison without a difference, at the settings that tuning chose."""
    seeds = generator.choice(scatter.shape[2], size=2 * num_blocks, replace=False)
    drawn = scatter[:, :, seeds]
    if flip_signs:
        drawn = drawn * generator.choice((-1.0, 1.0), size=2 * num_blocks)
    drawn = drawn + surface[:, None]
    tried, compared = drawn[:, :, :num_blocks], drawn[:, :, num_blocks:]
    chosen = tried.argmin(axis=1)
    return np.take_along_axis(compared, chosen[:, None, :], axis=1)[:, 0, :]


def _signs(table: Array) -> list[int]:
    """On which side of 0 the interval of each variant but the control lies; 0 if it holds 0, or if there is none."""
    model = fit_table(table, _CONFIDENCE)
    if model is None:
        return [0] * (len(table) - 1)
    widths = [model.yardstick(index).half_width for index in range(len(model.differences))]
    return [(d > width) - (d < -width) for d, width in zip(model.differences, widths, strict=True)]
