"""Several metrics of the same runs, tested together: is a variant's metric higher or lower than the baseline's?

Neither direction is better. All metrics share the level equally, and so do the variants of a metric (Bonferroni): the
family-wise error rate is at most the level.

A variant is tested by its own differences from the baseline, seed by seed (paired t), without pooling variances over
variants as for losses: at the small level of one metric, pooling would underestimate the error of a noisy variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate._validation import InputError
from tidegate.lab.judging.distributions import check_confidence, mean_and_sd, t_interval
from tidegate.lab.judging.power import MIN_BLOCKS, too_few_seeds

Direction: TypeAlias = Literal["higher", "lower", "no significant difference", "no verdict"]

_ROUNDING = 1e-14
"""Differences below this share of the numbers that they were computed from count as zero."""
_SAME = "every run equals the value that it is compared with, which counts as no difference, untested"
_NO_NOISE = "there is no noise to estimate, all seeds give the same difference"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetric:
    """One number per run, in one order of seeds."""

    name: str
    rows: Mapping[str, Sequence[float | None]]
    """By variant, one number per seed; None if a run has none, for example because it diverged."""
    control: str | None
    """The baseline's row; None compares each row with 0."""


# The fields of these two classes are those of `results.json`, which calls a metric a figure.
@dataclass(frozen=True, kw_only=True, slots=True)
class MetricResult:
    """The test of one metric of one variant against the baseline or 0; None for every number that does not exist."""

    figure: str
    """The metric's name."""
    variant: str
    control_mean: float | None
    """None also if the metric is compared with 0."""
    mean: float | None
    difference: float | None
    low: float | None
    high: float | None
    """Ends of the adjusted confidence interval."""
    verdict: Direction
    reason: str
    """Why there is no interval; empty if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricResults:
    """The tests of all metrics and variants, in the order in which they were given."""

    num_figures: int
    """Metrics that share the level."""
    confidence: float
    """Of all of them together."""
    figure_confidence: float
    """Of each metric, for all of its variants together."""
    results: tuple[MetricResult, ...]


def judge_metrics(metrics: Sequence[RunMetric], *, confidence: float = 0.95) -> MetricResults:
    """Test every metric of every variant against the baseline, or against 0, at a simultaneous confidence.

    Equal values in every run are no significant difference. There is no verdict with fewer than three seeds, if a run
    has no value, or if all seeds give the same non-zero difference, which leaves no noise to estimate.
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
    reason = _missing(control, f"the baseline, {metric.control},") or _missing(row, "it")
    if not reason and len(row) < MIN_BLOCKS:
        reason = too_few_seeds(len(row))
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
        verdict="no significant difference" if reason == _SAME else _direction(low, high),
        reason=reason,
    )


def _mean(row: Sequence[float | None]) -> float | None:
    """Return the mean of a row; None if a value is missing, since the rest would be a mean over other seeds."""
    known = [value for value in row if value is not None]
    return mean_and_sd(known)[0] if known and len(known) == len(row) else None


def _missing(row: Sequence[float | None], who: str) -> str:
    gaps = list(row).count(None)
    return f"{who} has no value in {gaps} of {len(row)} runs" if gaps else ""


def _direction(low: float | None, high: float | None) -> Direction:
    if low is None or high is None:
        return "no verdict"
    return "higher" if low > 0 else "lower" if high < 0 else "no significant difference"
