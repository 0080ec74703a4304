r"""Compare every variant with the control: the difference, its interval, the verdict. From plain numbers.

Seeds are blocks. The loss of variant v under seed b is $y_{vb} = \mu + \alpha_v + \beta_b + \varepsilon_{vb}$; the
residuals of this table measure the noise, however far the seeds lie apart, and each variant has a variance of its own:

$$s_v^2 = \frac{V}{(V-1)(S-1)} \sum_b r_{vb}^2, \qquad \tilde s_v^2 = \frac{(S-1)\, s_v^2 + \bar s^2}{S}$$

for V variants and S seeds. The variance of a difference is $(\tilde s_v^2 + \max(\tilde s_0^2, s_0^2)) / S$: each
variance is averaged with the mean of all, which counts as one seed and helps where seeds are few; the control's is only
raised, since it is in every difference. The degrees of freedom are Satterthwaite's, between S - 1 and (V - 1)(S - 1);
Dunnett's distribution of the largest of V - 1 differences makes all intervals hold at once. With two variants it is
the paired t test. `tests/lab/judging/test_judge.py` simulates the family-wise error rate, `docs/lab-notes.md` has it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from tidegate._validation import InputError
from tidegate._verdict import VerdictWord
from tidegate.lab.judging.distributions import (
    Array,
    check_confidence,
    detectable_noncentrality,
    dunnett_critical_value,
    dunnett_p_value,
    mean_and_sd,
)
from tidegate.lab.judging.words import verdict_sentence

Row: TypeAlias = tuple[float | None, ...]
"""One figure of a variant for each seed; None where the run diverged."""

MARGIN = 0.002
"""Differences below this share of the control's loss do not matter, unless somebody says otherwise.

The gain that is reported for gates of this kind is 0.42 % of the loss, ln(221.1/216.2) of 5.40 nats. What is called
equivalent by this margin has less than half of that.
"""
MIN_BLOCKS = 3
"""With fewer seeds, no verdict is given."""
_LARGEST_LOSS = 1e100
"""Squares of losses are summed, and would overflow beyond."""
POWER = 0.8
"""The chance with which a detectable difference is detected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """One variant against the control. None stands where there is no number."""

    name: str
    mean: float | None
    """Over the runs that ended."""
    sd: float | None
    """Between the runs that ended: the seeds' part is in it, so it says little of the difference."""
    difference: float | None = None
    """The variant's mean minus the control's, whichever sign is the good one."""
    relative_difference: float | None = None
    """The difference as a share of the control's mean."""
    low: float | None = None
    high: float | None = None
    """Ends of the interval by which it is judged."""
    p_value: float | None = None
    """Adjusted like the interval, which excludes zero where this is below one minus the confidence."""
    verdict: VerdictWord = "undecided"
    sentence: str = ""
    """The verdict in words."""
    num_diverged: int = 0
    standard_error: float | None = None
    """Of the difference."""
    degrees_of_freedom: float | None = None
    """Of the standard error."""
    critical_value: float | None = None
    """Half-width of the interval in standard errors: Dunnett's."""
    detectable: float | None = None
    """Difference detected with 80 % power, taking the estimated spread as true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every variant against the control, in the order in which they were given."""

    control: str
    num_blocks: int
    confidence: float = 0.95
    lower_is_better: bool = True
    unit: str = ""
    """Of the figures."""
    margin: float | None
    """In the unit of the figures; None if the control diverged."""
    relative_margin: float
    residual_sd: float | None = None
    """Standard deviation of the table's residuals; like the next, None if nothing was judged."""
    detectable: float | None = None
    """Difference detected with 80 % power, taking the estimated spread as true; the largest of the variants'."""
    variants: tuple[VariantResult, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    """Why there is no verdict on any variant; empty if there are verdicts."""

    def __getitem__(self, name: str) -> VariantResult:
        """Return the result of the variant of that name."""
        return {variant.name: variant for variant in self.variants}[name]


def compare_to_control(
    losses: Mapping[str, Sequence[float | None]],
    *,
    control: str,
    margin: float = MARGIN,
    confidence: float = 0.95,
    identical: Collection[str] = (),
    lower_is_better: bool = True,
    unit: str = "",
) -> Comparison:
    """Judge every variant against the control, and say it in sentences; `rule_text` says by which rule.

    A variant that is identical or has a diverged run is left out of the table before the model is fitted. No variant
    is judged if the control has a diverged run, if there are fewer than three seeds, or if the residual is zero.

    Args:
        losses: For each variant one loss for each seed, in one order of seeds; None where the run diverged.
        control: The variant that the others are compared with.
        margin: Half-width of the band of no importance, as a share of the control's mean.
        confidence: Of all intervals together.
        identical: Variants known to be the control under another name. One whose losses are the control's in every
            run, while they vary from run to run, is found without being named.
        lower_is_better: Which sign of a difference is the good one.
        unit: Of the losses, for the sentences.
    """
    rows: dict[str, Row] = {name: tuple(row) for name, row in losses.items()}
    check_confidence(confidence)
    _check_table(rows, control, margin, identical)
    results = {name: _unjudged(name, rows, control, identical) for name in rows}
    # The table that the model is fitted to: those that are identical or diverged are left out.
    names = [control, *(name for name, result in results.items() if result.verdict == "undecided")]
    refusal, model = "", None
    if None in rows[control]:
        refusal = f"the control, {control}, diverged in {rows[control].count(None)} of {len(rows[control])} runs"
    elif len(rows[control]) < MIN_BLOCKS:
        refusal = f"a verdict needs at least {MIN_BLOCKS} seeds, and there are {len(rows[control])}"
    if not refusal and len(names) > 1:
        model = fit_additive_model(np.array([rows[name] for name in names], dtype=np.float64), confidence)
        if model is None:
            refusal = "no noise is left to judge by: every seed gives the same differences"
    control_mean = _complete_mean(rows[control])
    absolute_margin = None if control_mean is None else margin * abs(control_mean)
    if model is not None and absolute_margin is not None:
        for name, difference, error in zip(names[1:], model.differences, model.errors, strict=True):
            results[name] = _judge(results[name], difference, error, len(names) - 1, absolute_margin, lower_is_better)
    comparison = Comparison(
        control=control,
        num_blocks=len(rows[control]),
        confidence=confidence,
        lower_is_better=lower_is_better,
        unit=unit,
        margin=absolute_margin,
        relative_margin=margin,
        residual_sd=None if model is None else model.residual_sd,
        detectable=max(
            (result.detectable for result in results.values() if result.detectable is not None), default=None
        ),
        variants=tuple(results.values()),
        warnings=tuple(_warnings(rows, control, identical)),
        refusal=refusal,
    )
    sentences = (replace(result, sentence=verdict_sentence(result, comparison)) for result in comparison.variants)
    return replace(comparison, variants=tuple(sentences))


def _check_table(rows: Mapping[str, Row], control: str, margin: float, identical: Collection[str]) -> None:
    if control not in rows:
        raise InputError("control", expected=f"one of the variants {list(rows)}", got=control)
    if len(rows) < 2:
        raise InputError(
            "losses", expected="of the control and at least one variant to compare with it", got=list(rows)
        )
    if isinstance(identical, str) or not set(identical) <= set(rows) - {control}:
        raise InputError("identical", expected=f"variants other than the control, of {list(rows)}", got=identical)
    lengths = {name: len(row) for name, row in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[control]:
        hint = "Use None where a run diverged."
        raise InputError("losses", expected="one number for each seed in every variant", got=lengths, hint=hint)
    for name, row in rows.items():
        for value in row:
            if value is not None and not abs(value) < _LARGEST_LOSS:
                expected = f"finite and below {_LARGEST_LOSS:g}"
                raise InputError(f"losses[{name}]", expected=expected, got=value, hint="Use None where a run diverged.")
    if not 0 <= margin < math.inf:
        raise InputError("margin", expected="a share of the control's mean, 0 or more", got=margin)


def _unjudged(name: str, rows: Mapping[str, Row], control: str, identical: Collection[str]) -> VariantResult:
    """Return all that can be said of a variant without the model; `undecided` is for the model to decide."""
    row, control_mean = rows[name], _complete_mean(rows[control])
    # A control that never varies (an accuracy of 1 under every seed) may well be equalled by something else.
    control_varies = len(set(rows[control])) > 1
    verdict: VerdictWord = "diverged" if None in row else "undecided"
    if name == control:
        verdict = "control"
    elif name in identical or (control_varies and row == rows[control]):
        verdict = "identical"
    complete, difference = _complete_mean(row), None
    if control_mean is not None and complete is not None and name != control:
        difference = complete - control_mean
    ended = [value for value in row if value is not None]
    mean, sd = mean_and_sd(ended) if ended else (None, None)
    return VariantResult(
        name=name,
        mean=mean,
        sd=sd,
        difference=difference,
        relative_difference=difference / abs(control_mean) if control_mean and difference is not None else None,
        verdict=verdict,
        num_diverged=row.count(None),
    )


def _complete_mean(row: Row) -> float | None:
    """Return the mean of a row without divergence; None of others."""
    ended = [value for value in row if value is not None]
    return mean_and_sd(ended)[0] if len(ended) == len(row) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorEstimate:
    """The error that a difference is compared with."""

    standard_error: float
    degrees_of_freedom: float
    critical_value: float

    @property
    def half_width(self) -> float:
        """Of the interval."""
        return self.critical_value * self.standard_error

    @property
    def detectable(self) -> float:
        """Difference detected with 80 % power, taking the estimated spread as true; in the unit of the losses."""
        return self.standard_error * detectable_noncentrality(self.critical_value, self.degrees_of_freedom, POWER)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditiveModel:
    """The additive model of variant and seed, fitted to a table."""

    residual_sd: float
    differences: tuple[float, ...]
    """One for each variant but the control, like `errors`."""
    errors: tuple[ErrorEstimate, ...]


def fit_additive_model(table: Array, confidence: float) -> AdditiveModel | None:
    """Fit the additive model to (variant, seed), the control first; None if the residual is zero but for rounding."""
    num_variants, num_seeds = table.shape
    centered = table - table.mean(axis=0)
    residual = centered - centered.mean(axis=1, keepdims=True)
    variances = (residual**2).sum(axis=1) * num_variants / ((num_variants - 1) * (num_seeds - 1))
    residual_sd = math.sqrt(float(variances.mean()))
    if residual_sd <= 1e-14 * float(np.abs(table).max()):
        return None
    shrunk = ((num_seeds - 1) * variances + variances.mean()) / num_seeds
    standard_errors = np.sqrt((shrunk[1:] + max(shrunk[0], variances[0])) / num_seeds)
    errors = (
        ErrorEstimate(
            standard_error=float(standard_error),
            degrees_of_freedom=degrees,
            critical_value=dunnett_critical_value(num_variants - 1, degrees, confidence),
        )
        for standard_error, degrees in zip(standard_errors, degrees_of_freedom(shrunk, num_seeds), strict=True)
    )
    differences = (table[1:] - table[0]).mean(axis=1)
    return AdditiveModel(residual_sd=residual_sd, differences=tuple(differences.tolist()), errors=tuple(errors))


def degrees_of_freedom(variances: Array, num_seeds: int) -> list[float]:
    r"""Return Satterthwaite's degrees of freedom of each difference's variance, rounded down to a tenth.

    The variance is a quadratic form $\sum_u w_u r_u^2$ of the residuals of a seed, whose covariance is
    $M = C \operatorname{diag}(\tilde s^2) C$ with the centering matrix C: $\nu = (S-1) \operatorname{tr}(WM)^2 /
    \operatorname{tr}(WMWM)$. Rounding keeps the critical values few enough to cache.
    """
    num_variants = len(variances)
    centering = np.eye(num_variants) - 1 / num_variants
    covariance = centering @ (variances[:, None] * centering)
    weights = np.full((num_variants, num_variants), 2 / (num_variants * num_seeds))
    weights += (num_seeds - 1) / num_seeds * np.eye(num_variants)
    weights[:, 0] += (num_seeds - 1) / num_seeds
    weights = weights[1:]
    degrees = (weights @ np.diag(covariance)) ** 2 / (weights @ covariance**2 * weights).sum(axis=1)
    return [math.floor(10 * (num_seeds - 1) * each + 1e-6) / 10 for each in degrees.tolist()]


def _judge(
    result: VariantResult,
    difference: float,
    error: ErrorEstimate,
    num_comparisons: int,
    margin: float,
    lower_is_better: bool,
) -> VariantResult:
    """Return a variant's result with the model's verdict on it."""
    low, high = difference - error.half_width, difference + error.half_width
    return replace(
        result,
        difference=difference,
        low=low,
        high=high,
        p_value=dunnett_p_value(difference / error.standard_error, num_comparisons, error.degrees_of_freedom),
        verdict=_verdict(low, high, margin, lower_is_better),
        standard_error=error.standard_error,
        degrees_of_freedom=error.degrees_of_freedom,
        critical_value=error.critical_value,
        detectable=error.detectable,
    )


def _verdict(low: float, high: float, margin: float, lower_is_better: bool) -> VerdictWord:
    if -margin < low and high < margin:
        return "equivalent"
    if low <= 0 <= high:
        return "inconclusive"
    return "better" if (high < 0) == lower_is_better else "worse"


def _warnings(rows: Mapping[str, Row], control: str, identical: Collection[str]) -> Iterator[str]:
    for name in rows:
        if name in identical and rows[name] != rows[control]:
            why = "yet their losses differ: runs are not reproducible here"
            yield f"{name} is said to be identical to {control}, {why}"
