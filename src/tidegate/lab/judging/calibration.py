"""How often the whole procedure, tuning included, finds a difference: where there is none, and where there is one.

Comparisons are drawn from losses of real runs: of every variant at every setting under many seeds. What the variants
differ by on average is taken out at each setting; how far their runs scatter, and how alike those of one seed are,
stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy import special

from tidegate._validation import InputError
from tidegate.lab.judging.distributions import Array
from tidegate.lab.judging.judge import MARGIN, MIN_BLOCKS, compare_to_control, fit_additive_model
from tidegate.lab.judging.placebos import side_of_zero

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Results of many comparisons without a difference, and of as many with one."""

    num_comparisons: int
    num_alarms: int
    """Comparisons without a difference in which an interval excludes 0."""
    num_seen: int
    """Comparisons with a difference in which the interval of the one variant that differs lies on the right side."""

    @property
    def alarm_rate(self) -> float:
        """Share of false alarms."""
        return self.num_alarms / self.num_comparisons

    @property
    def alarm_limit(self) -> float:
        """Upper limit of the true rate with 95 % confidence (Clopper and Pearson)."""
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

    Args:
        losses: (variant, setting, seed) of real runs, the control first; finite.
        num_blocks: Blocks of each comparison; it takes two seeds for each.
        num_comparisons: Comparisons to draw.
        effect: Share of the mean loss by which the first variant after the control is better, for the power.
        flip_signs: Flip the sign of all that scatters under a seed, or not, by chance. Deviations from a mean of few
            seeds add up to 0, which makes alarms rarer; flipped ones do not, but they are symmetric.
        seed: Random seed of the draws.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 3 or losses.shape[0] < 2 or not np.isfinite(losses).all():
        expected = "finite, of shape (variant, setting, seed), with at least two variants"
        raise InputError("losses", expected=expected, got=losses.shape)
    _check_counts(num_blocks=num_blocks, num_comparisons=num_comparisons)
    num_seeds = losses.shape[2]
    if num_seeds < 2 * num_blocks:
        raise InputError("losses", expected=f"of at least {2 * num_blocks} seeds, two for each block", got=num_seeds)
    generator = np.random.default_rng(seed)
    surface = losses.mean(axis=(0, 2))
    scatter = (losses - losses.mean(axis=2, keepdims=True)) * np.sqrt(num_seeds / (num_seeds - 1))
    shift = np.zeros((losses.shape[0], 1))
    shift[1] = effect * surface.mean()
    alarms = seen = 0
    for _ in range(num_comparisons):
        table = _draw_table(surface, scatter, num_blocks, generator, flip_signs=flip_signs)
        alarms += any(_signs(table))
        seen += _signs(table - shift)[0] < 0
    return Calibration(num_comparisons=num_comparisons, num_alarms=alarms, num_seen=seen)


def false_positive_rate(
    noise: Sequence[float],
    *,
    num_variants: int = 4,
    num_blocks: int = 5,
    num_comparisons: int = 200,
    seed: int = 0,
    margin: float = MARGIN,
) -> float:
    """Return the share of comparisons without any difference in which some variant's interval excludes zero.

    Args:
        noise: Losses of one and the same variant under many seeds. Each comparison draws its cells from them, none
            twice in one table; different tables share losses, so that the share is about this noise and no other.
        num_variants: Variants of each comparison, the control included.
        num_blocks: Blocks of each comparison.
        num_comparisons: Comparisons to draw.
        seed: Random seed of the draws.
        margin: As in `compare_to_control`.
    """
    _check_counts(num_blocks=num_blocks, num_comparisons=num_comparisons)
    if num_variants < 2:
        raise InputError("num_variants", expected="at least 2", got=num_variants)
    num_cells = num_variants * num_blocks
    if len(noise) < num_cells:
        raise InputError("noise", expected=f"one number for each of the {num_cells} cells of a table", got=len(noise))
    generator = np.random.default_rng(seed)
    found = 0
    for _ in range(num_comparisons):
        cells = generator.choice(np.asarray(noise, dtype=np.float64), size=num_cells, replace=False)
        table = {str(index): row for index, row in enumerate(cells.reshape(num_variants, num_blocks).tolist())}
        comparison = compare_to_control(table, control="0", margin=margin)
        found += any(side_of_zero(variant.low, variant.high) for variant in comparison.variants)
    return found / num_comparisons


def _check_counts(*, num_blocks: int, num_comparisons: int) -> None:
    if num_blocks < MIN_BLOCKS:
        raise InputError("num_blocks", expected=f"at least {MIN_BLOCKS}", got=num_blocks)
    if num_comparisons < 1:
        raise InputError("num_comparisons", expected="at least 1", got=num_comparisons)


def _draw_table(surface: Array, scatter: Array, num_blocks: int, generator: Generator, *, flip_signs: bool) -> Array:
    """Return the losses (variant, block) of one comparison without a difference, at the settings that tuning chose."""
    seeds = generator.choice(scatter.shape[2], size=2 * num_blocks, replace=False)
    drawn = scatter[:, :, seeds]
    if flip_signs:
        drawn = drawn * generator.choice((-1.0, 1.0), size=2 * num_blocks)
    drawn = drawn + surface[:, None]
    tried, compared = drawn[:, :, :num_blocks], drawn[:, :, num_blocks:]
    chosen = tried.argmin(axis=1)
    return np.take_along_axis(compared, chosen[:, None, :], axis=1)[:, 0, :]


def _signs(table: Array) -> list[int]:
    """Return the side of 0 of each variant's interval but the control's; 0 if it holds 0, or if there is none."""
    model = fit_additive_model(table, _CONFIDENCE)
    if model is None:
        return [0] * (len(table) - 1)
    return [
        (difference > error.half_width) - (difference < -error.half_width)
        for difference, error in zip(model.differences, model.errors, strict=True)
    ]
