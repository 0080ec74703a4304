"""Several metrics of the same runs, judged at once: is a variant's metric higher than the control's, or lower?

Neither direction is the good one. All metrics share the level equally, and so do the variants of a metric
(Bonferroni): the chance of any false verdict at all is at most the level.

A variant is judged by its own differences to the control, seed by seed (paired t), and not, as a loss is, by the
residual of all variants. That residual is too small for a variant noisier than the others, and the test of spreads that
is to notice it misses more such variants than the small level of one metric allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate._validation import InputError
from tidegate.lab.judging.distributions import check_confidence, mean_and_sd, t_interval
from tidegate.lab.judging.judge import MIN_BLOCKS

Direction: TypeAlias = Literal["higher", "lower", "not told apart", "no verdict"]

_ROUNDING = 1e-14
"""What is below this share of the numbers that it was computed from is zero."""
_SAME = "the numbers are equal in every run"
_NO_NOISE = "there is no noise to judge by, every seed gives the same difference"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetric:
    """One number of every run, in one order of seeds."""

    name: str
    rows: Mapping[str, Sequence[float | None]]
    """By variant, one number for each seed; None where a run has none, as where it diverged."""
    control: str | None
    """The row that the others are compared with; None compares each row with 0."""


# The fields of these two are those of `results.json`, which calls a metric a figure.
@dataclass(frozen=True, kw_only=True, slots=True)
class MetricResult:
    """One metric of one variant against the control, or against 0. None stands where there is no number."""

    figure: str
    """The metric's name."""
    variant: str
    control_mean: float | None
    """None also where the metric is compared with 0."""
    mean: float | None
    difference: float | None
    low: float | None
    high: float | None
    """Ends of the interval by which it is judged."""
    verdict: Direction
    reason: str
    """Why there is no interval; empty if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricResults:
    """Every metric of every variant, in the order in which they were given."""

    num_figures: int
    """Metrics that share the level."""
    confidence: float
    """Of all of them together."""
    figure_confidence: float
    """Of each metric, for all of its variants together."""
    results: tuple[MetricResult, ...]


def judge_metrics(metrics: Sequence[RunMetric], *, confidence: float = 0.95) -> MetricResults:
    """Judge every metric of every variant against the control, or against 0, at a confidence that holds for all.

    Equal numbers in every run show no difference. There is no verdict on differences that are equal under every seed
    and not 0, which leave no noise to judge by, with fewer than three seeds, and where a run has no number.
    """
    check_confidence(confidence)
    level = (1 - confidence) / max(len(metrics), 1)
    results: list[MetricResult] = []
    for metric in metrics:
        if metric.control is not None and metric.control not in metric.rows:
            expected = f"one of the rows {list(metric.rows)} of {metric.name}"
            raise InputError("control", expected=expected, got=metric.control)
        variants = [name for name in metric.rows if name != metric.control]
        results += [_judge_variant(metric, name, level / len(variants)) for name in variants]
    return MetricResults(
        num_figures=len(metrics), confidence=confidence, figure_confidence=1 - level, results=tuple(results)
    )


def _judge_variant(metric: RunMetric, variant: str, level: float) -> MetricResult:
    row = metric.rows[variant]
    control = (0.0,) * len(row) if metric.control is None else metric.rows[metric.control]
    pairs = [(own, other) for own, other in zip(row, control, strict=True) if own is not None and other is not None]
    differences = [own - other for own, other in pairs]
    rounding = _ROUNDING * max((abs(number) for pair in pairs for number in pair), default=0.0)
    reason = _missing(control, f"the control, {metric.control},") or _missing(row, "it")
    if not reason and len(row) < MIN_BLOCKS:
        reason = f"a verdict needs at least {MIN_BLOCKS} seeds, and there are {len(row)}"
    if not reason and (mean_and_sd(differences)[1] or 0.0) <= rounding:
        reason = _SAME if all(abs(difference) <= rounding for difference in differences) else _NO_NOISE
    low, high = (None, None) if reason else t_interval(differences, 1 - level)
    return MetricResult(
        figure=metric.name,
        variant=variant,
        control_mean=None if metric.control is None else _mean(control),
        mean=_mean(row),
        difference=_mean(differences) if len(pairs) == len(row) else None,
        low=low,
        high=high,
        verdict="not told apart" if reason == _SAME else _direction(low, high),
        reason=reason,
    )


def _mean(row: Sequence[float | None]) -> float | None:
    """Return the mean of a row without gaps; what is left of another would be a mean over other seeds."""
    known = [value for value in row if value is not None]
    return mean_and_sd(known)[0] if known and len(known) == len(row) else None


def _missing(row: Sequence[float | None], who: str) -> str:
    gaps = list(row).count(None)
    return f"{who} has no such number in {gaps} of {len(row)} runs" if gaps else ""


def _direction(low: float | None, high: float | None) -> Direction:
    if low is None or high is None:
        return "no verdict"
    return "higher" if low > 0 else "lower" if high < 0 else "not told apart"
