"""Several figures of the same runs, judged at once: is a variant's figure higher than the control's, or lower?

Neither direction is the good one. The figures share the level equally (Bonferroni), and within a figure all variants
are judged at once. So the chance that anything at all is told apart wrongly is at most the level.

Two intervals are made of a difference, one from the residual of the variant × seed table (Dunnett), one from the
variant's own differences to the control (paired t, Bonferroni), and the wider counts. The first alone is too narrow for
a variant that is noisier than the others: a test of spreads, which comparisons of losses rely on, misses too many of
those at the small level that is left for one figure. The second alone is too narrow where chance, or a count, makes a
variant's few differences nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.lab.judging.distributions import (
    dunnett_critical_value,
    mean_and_sd,
    require_confidence,
    t_interval,
)
from tidegate.lab.judging.judge import MIN_BLOCKS, Comparison, VariantResult, judge_variants

Direction: TypeAlias = Literal["higher", "lower", "not told apart", "no verdict"]

_ROUNDING = 1e-14
"""A deviation below this share of the largest number is rounding."""
_NO_NOISE = "there is no noise to judge by, every seed says the same"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What is measured of every run, in one order of seeds."""

    name: str
    rows: Mapping[str, Sequence[float | None]]
    """By variant, one number for each seed; None where a run has none, as where it diverged."""
    control: str | None
    """The row that the others are compared with; None compares each row with 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureResult:
    """One figure of one variant against the control, or against 0. None stands where there is no number."""

    figure: str
    variant: str
    control_mean: float | None
    """None also where the figure is compared with 0."""
    mean: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the interval by which it is judged."""
    verdict: Direction
    reason: str = ""
    """Why there is no interval; empty if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureResults:
    """Every figure of every variant, in the order in which they were given."""

    num_figures: int
    """Figures that share the level."""
    confidence: float
    """Of all of them together."""
    figure_confidence: float
    """Of each."""
    results: tuple[FigureResult, ...]


def judge_figures(figures: Sequence[Figure], *, confidence: float = 0.95) -> FigureResults:
    """Judge every figure of every variant against the control, or against 0, at a confidence that holds for all.

    A figure without a control has a t interval for each row, and its rows share the figure's part of the level equally.
    """
    require_confidence(confidence)
    share = (1 - confidence) / max(len(figures), 1)
    results = [
        result
        for figure in figures
        for result in (_against_zero(figure, share) if figure.control is None else _against_control(figure, share))
    ]
    return FigureResults(
        num_figures=len(figures), confidence=confidence, figure_confidence=1 - share, results=tuple(results)
    )


def _against_control(figure: Figure, level: float) -> list[FigureResult]:
    assert figure.control is not None
    control = figure.rows[figure.control]
    comparison = judge_variants(
        figure.rows,
        control=figure.control,
        margin=0.0,
        confidence=1 - level,
        identical=(),
        lower_is_better=True,
        unit="",
    )
    pooled = _pooled_half_width(comparison)
    refusal = _missing(control, f"the control, {figure.control},") or _few(control)
    return [
        _result_of(figure, result, pooled, refusal or _missing(figure.rows[result.name], "it"))
        for result in comparison.variants
        if result.name != figure.control
    ]


def _pooled_half_width(comparison: Comparison) -> float:
    """Half the width of the interval by the table's residual; 0 if nothing was judged."""
    num_judged = sum(result.low is not None for result in comparison.variants)
    if not num_judged or comparison.residual_sd is None:
        return 0.0
    degrees = num_judged * (comparison.num_blocks - 1)
    critical = dunnett_critical_value(num_judged, degrees, comparison.confidence)
    return critical * comparison.residual_sd * math.sqrt(2 / comparison.num_blocks)


def _result_of(figure: Figure, result: VariantResult, pooled: float, refusal: str) -> FigureResult:
    """Turn a verdict on a loss, which knows a good direction, into one on a figure, which does not.

    pooled : half the width of the interval by the table's residual
    """
    assert figure.control is not None
    is_identical = result.verdict == "identical" and not refusal
    same = f"the numbers are those of {figure.control} in every run"
    low, high = result.own_low, result.own_high
    if low is not None and high is not None and result.difference is not None:
        low, high = min(low, result.difference - pooled), max(high, result.difference + pooled)
    return FigureResult(
        figure=figure.name,
        variant=result.name,
        control_mean=_mean(figure.rows[figure.control]),
        mean=_mean(figure.rows[result.name]),
        difference=result.difference,
        low=low,
        high=high,
        verdict="not told apart" if is_identical else _direction(low, high),
        reason="" if low is not None else same if is_identical else refusal or _NO_NOISE,
    )


def _against_zero(figure: Figure, level: float) -> list[FigureResult]:
    return [_row_against_zero(figure.name, name, row, level / len(figure.rows)) for name, row in figure.rows.items()]


def _row_against_zero(figure: str, variant: str, row: Sequence[float | None], level: float) -> FigureResult:
    known, mean = [value for value in row if value is not None], _mean(row)
    reason = _missing(row, "it") or _few(row) or ("" if _varies(known) else _NO_NOISE)
    low, high = (None, None) if reason else t_interval(known, 1 - level)
    return FigureResult(
        figure=figure,
        variant=variant,
        control_mean=None,
        mean=mean,
        difference=mean,
        low=low,
        high=high,
        verdict=_direction(low, high),
        reason=reason,
    )


def _varies(values: Sequence[float]) -> bool:
    _, sd = mean_and_sd(values)
    return sd is not None and sd > _ROUNDING * max(map(abs, values))


def _mean(row: Sequence[float | None]) -> float | None:
    """Mean of a row without gaps; what is left of another would be a mean over other seeds."""
    known = [value for value in row if value is not None]
    return mean_and_sd(known)[0] if known and len(known) == len(row) else None


def _missing(row: Sequence[float | None], who: str) -> str:
    gaps = list(row).count(None)
    return f"{who} has no such number in {gaps} of {len(row)} runs" if gaps else ""


def _few(row: Sequence[float | None]) -> str:
    return f"a verdict needs at least {MIN_BLOCKS} seeds, and there are {len(row)}" if len(row) < MIN_BLOCKS else ""


def _direction(low: float | None, high: float | None) -> Direction:
    if low is None or high is None:
        return "no verdict"
    return "higher" if low > 0 else "lower" if high < 0 else "not told apart"
