"""Several figures of the same runs, judged at once: is a variant's figure higher than the control's, or lower?

Neither direction is the good one. All figures share the level equally, and so do the variants of a figure
(Bonferroni): the chance that anything at all is told apart wrongly is at most the level.

A variant is judged by its own differences to the control, seed by seed (paired t), and not, as a loss is, by the
residual of all variants. That residual is too small for a variant noisier than the others, and the test of spreads that
is to notice it misses more such variants than the small level of one figure allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.lab.judging.distributions import mean_and_sd, require_confidence, t_interval
from tidegate.lab.judging.judge import MIN_BLOCKS

Direction: TypeAlias = Literal["higher", "lower", "not told apart", "no verdict"]

_ROUNDING = 1e-14
"""What is below this share of the numbers that it was computed from is zero."""


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
    difference: float | None
    low: float | None
    high: float | None
    """Ends of the interval by which it is judged."""
    verdict: Direction
    reason: str
    """Why there is no interval; empty if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureResults:
    """Every figure of every variant, in the order in which they were given."""

    num_figures: int
    """Figures that share the level."""
    confidence: float
    """Of all of them together."""
    figure_confidence: float
    """Of each figure, for all of its variants together."""
    results: tuple[FigureResult, ...]


def judge_figures(figures: Sequence[Figure], *, confidence: float = 0.95) -> FigureResults:
    """Judge every figure of every variant against the control, or against 0, at a confidence that holds for all.

    Equal numbers in every run are not told apart. There is no verdict on differences that are equal under every seed
    and not 0, which leave no noise to judge by, with fewer than three seeds, and where a run has no number.
    """
    require_confidence(confidence)
    share = (1 - confidence) / max(len(figures), 1)
    return FigureResults(
        num_figures=len(figures),
        confidence=confidence,
        figure_confidence=1 - share,
        results=tuple(result for figure in figures for result in _judge_figure(figure, share)),
    )


def _judge_figure(figure: Figure, level: float) -> list[FigureResult]:
    if figure.control is not None and figure.control not in figure.rows:
        raise ValueError(
            f"control must be one of the rows {list(figure.rows)} of {figure.name}; got {figure.control!r}."
        )
    variants = [name for name in figure.rows if name != figure.control]
    return [_judge_variant(figure, name, level / len(variants)) for name in variants]


def _judge_variant(figure: Figure, variant: str, level: float) -> FigureResult:
    row, control = figure.rows[variant], _control_row(figure, len(figure.rows[variant]))
    pairs = [(own, other) for own, other in zip(row, control, strict=True) if own is not None and other is not None]
    differences = [own - other for own, other in pairs]
    rounding = _ROUNDING * max((abs(number) for pair in pairs for number in pair), default=0.0)
    is_same = all(abs(difference) <= rounding for difference in differences)
    refusal = _missing(control, f"the control, {figure.control},") or _missing(row, "it") or _few(row)
    reason = refusal or ("" if _sd(differences) > rounding else _SAME if is_same else _NO_NOISE)
    low, high = (None, None) if reason else t_interval(differences, 1 - level)
    return FigureResult(
        figure=figure.name,
        variant=variant,
        control_mean=None if figure.control is None else _mean(control),
        mean=_mean(row),
        difference=_mean(differences) if len(pairs) == len(row) else None,
        low=low,
        high=high,
        verdict="not told apart" if reason == _SAME else _direction(low, high),
        reason=reason,
    )


_SAME = "the numbers are equal in every run"
_NO_NOISE = "there is no noise to judge by, every seed gives the same difference"


def _control_row(figure: Figure, length: int) -> Sequence[float | None]:
    return (0.0,) * length if figure.control is None else figure.rows[figure.control]


def _sd(values: Sequence[float]) -> float:
    return (mean_and_sd(values)[1] or 0.0) if values else 0.0


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
