"""Error rates of the whole procedure, tuning included: false positives without a difference, and power with one.

Comparisons are drawn from losses of real runs: every variant at every setting under many seeds. At each setting the
variants' mean differences are subtracted; the variance of the runs and their correlation within a seed stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy import special

from tidegate._validation import InputError
from tidegate.lab.judging.distributions import Array
from tidegate.lab.judging.judge import MARGIN, compare_to_control, fit_additive_model
from tidegate.lab.judging.placebos import side_of_zero
from tidegate.lab.judging.power import MIN_BLOCKS

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Results of many comparisons without a difference, and of equally many with one."""

    num_comparisons: int
    num_alarms: int
    """False positives: comparisons without a difference in which an interval excludes 0."""
    num_seen: int
    """True positives: comparisons with a difference in which its interval lies on the right side of 0."""

    @property
    def alarm_rate(self) -> float:
        """False positive rate."""
        return self.num_alarms / self.num_comparisons

    @property
    def alarm_limit(self) -> float:
        """Upper 95 % confidence limit of the false positive rate (Clopper–Pearson)."""
        missed = self.num_comparisons - self.num_alarms
        return 1.0 if not missed else float(special.betaincinv(self.num_alarms + 1, missed, 0.95))

    @property
    def power(self) -> float:
        """Share of the comparisons with a difference that detect it."""
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
    """Draw comparisons from recorded losses, tune each variant inside each block, and test.

    Each comparison samples seeds without replacement: half for tuning, half for comparing. In every block a variant is
    compared at the setting that was best on the block's tuning seed.

    Args:
        losses: (variant, setting, seed) of real runs, the baseline first; finite.
        num_blocks: Blocks of each comparison, with two seeds each.
        num_comparisons: Comparisons to draw.
        effect: Share of the mean loss by which the first variant after the baseline is better, for the power.
        flip_signs: Flip the sign of all deviations of a seed at random. Deviations from a mean of few seeds sum to 0,
            which makes false positives rarer; flipped deviations do not, but their distribution is symmetric.
        seed: Random seed of the draws.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 3 or losses.shape[0] < 2 or not np.isfinite(losses).all():
        expected = "finite, of shape (variant, setting, seed), with at least two variants"
        raise InputError("losses", expected=expected, got=losses.shape)
    _check_counts(num_blocks=num_blocks, num_comparisons=num_comparisons)
    num_seeds = losses.shape[2]
    if num_seeds < 2 * num_blocks:
        raise InputError("losses", expected=f"of at least {2 * num_blocks} seeds, two per block", got=num_seeds)
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
    """Return the share of comparisons without a difference in which some variant's interval excludes zero.

    Args:
        noise: Losses of a single variant under many seeds. Each comparison draws its table from them without
            replacement; tables share losses, so the rate is conditional on this noise.
        num_variants: Variants of each comparison, the baseline included.
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
        expected = f"at least {num_cells} numbers, one for each cell of a table"
        raise InputError("noise", expected=expected, got=len(noise))
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
    """Return the (variant, block) losses of one comparison without a difference, at the selected settings."""
    seeds = generator.choice(scatter.shape[2], size=2 * num_blocks, replace=False)
    drawn = scatter[:, :, seeds]
    if flip_signs:
        drawn = drawn * generator.choice((-1.0, 1.0), size=2 * num_blocks)
    drawn = drawn + surface[:, None]
    tried, compared = drawn[:, :, :num_blocks], drawn[:, :, num_blocks:]
    chosen = tried.argmin(axis=1)
    return np.take_along_axis(compared, chosen[:, None, :], axis=1)[:, 0, :]


def _signs(table: Array) -> list[int]:
    """Return the side of 0 of each variant's interval, without the baseline's; 0 if it contains 0 or does not exist."""
    model = fit_additive_model(table, _CONFIDENCE)
    if model is None:
        return [0] * (len(table) - 1)
    return [side_of_zero(contrast.low, contrast.high) for contrast in model[1]]
