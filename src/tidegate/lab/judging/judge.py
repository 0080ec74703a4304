r"""Compare every variant with the baseline: difference, interval, verdict. Plain numbers in, a `Comparison` out.

Seeds are blocks. The loss of variant v under seed b is $y_{vb} = \mu + \alpha_v + \beta_b + \varepsilon_{vb}$. The
residuals of this table estimate the noise, however much seeds differ, and each variant has its own variance:

$$s_v^2 = \frac{V}{(V-1)(S-1)} \sum_b r_{vb}^2, \qquad \tilde s_v^2 = \frac{(S-1)\, s_v^2 + \bar s^2}{S}$$

for V variants and S seeds. The variance of a difference is $(\tilde s_v^2 + \max(\tilde s_0^2, s_0^2)) / S$: each
variance is averaged with the mean of all, which counts as one seed and helps if seeds are few; the baseline's is only
raised, since it is part of every difference. Degrees of freedom are Satterthwaite's, between S - 1 and (V - 1)(S - 1);
Dunnett's distribution of the largest of V - 1 differences makes all intervals hold simultaneously. With two variants
this is the paired t test. `tests/lab/judging/test_judge.py` simulates the family-wise error rate; `docs/lab-notes.md`
has the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
from tidegate.lab.judging.power import MIN_BLOCKS, POWER, degrees_of_freedom, too_few_seeds
from tidegate.lab.judging.words import verdict_sentence

Row: TypeAlias = tuple[float | None, ...]
"""The loss of a variant for each seed; None where the run diverged."""

MARGIN = 0.002
"""The default margin: differences below this share of the baseline's loss are irrelevant.

The gain reported for gates of this kind is 0.42 % of the loss, ln(221.1/216.2) of 5.40 nats. Equivalence by this margin
rules out half of that.
"""
_LARGEST_LOSS = 1e100
"""Squares of larger losses would overflow when summed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """The result of one variant against the baseline; None for every number that does not exist."""

    name: str
    mean: float | None
    """Over the finished runs."""
    sd: float | None
    """Over the finished runs. It includes the variance between seeds, so it is not the error of the difference."""
    difference: float | None = None
    """The variant's mean minus the baseline's."""
    relative_difference: float | None = None
    """The difference as a share of the baseline's mean."""
    low: float | None = None
    high: float | None = None
    """Ends of the simultaneous confidence interval."""
    p_value: float | None = None
    """Adjusted like the interval, which excludes zero if this is below one minus the confidence."""
    verdict: VerdictWord = "undecided"
    sentence: str = ""
    """The verdict in words."""
    num_diverged: int = 0
    standard_error: float | None = None
    """Of the difference."""
    degrees_of_freedom: float | None = None
    """Of the standard error."""
    critical_value: float | None = None
    """Half-width of the interval in standard errors (Dunnett)."""
    detectable: float | None = None
    """Minimum detectable effect: the difference detected with 80 % power, taking the estimated variance as true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The results of all variants, in the order in which they were given."""

    control: str
    num_blocks: int
    confidence: float = 0.95
    lower_is_better: bool = True
    unit: str = ""
    """Of the losses."""
    margin: float | None
    """In the unit of the losses; None if the baseline diverged."""
    relative_margin: float
    residual_sd: float | None = None
    """Standard deviation of the table's residuals; like `detectable`, None if no variant was tested."""
    detectable: float | None = None
    """The largest minimum detectable effect of the variants."""
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
    time_of: Callable[[int], str] | None = None,
) -> Comparison:
    """Compare every variant with the baseline; `rule_text` states the rule.

    A variant that is identical or has a diverged run is left out of the table before the model is fitted. There is no
    verdict if the baseline has a diverged run, if there are fewer than three seeds, or if the residuals are zero.

    Args:
        losses: For each variant one loss per seed, in the same order of seeds; None where the run diverged.
        control: The baseline.
        margin: Half-width of the equivalence margin, as a share of the baseline's mean.
        confidence: Of all intervals together.
        identical: Variants known to be the baseline under another name. A variant whose losses equal the baseline's in
            every run, while these vary between runs, is recognized without being named.
        lower_is_better: Whether a negative difference is an improvement.
        unit: Of the losses, for the sentences.
        time_of: Returns the time that a number of seeds takes, in words, for the sentences; empty if unknown.
    """
    rows: dict[str, Row] = {name: tuple(row) for name, row in losses.items()}
    check_confidence(confidence)
    _check_table(rows, control, margin, identical)
    results = {name: _unjudged(name, rows, control, identical) for name in rows}
    # The table that the model is fitted to: those that are identical or diverged are left out.
    names = [control, *(name for name, result in results.items() if result.verdict == "undecided")]
    refusal, residual_sd = "", None
    contrasts: list[Contrast] = []
    if None in rows[control]:
        refusal = f"the baseline, {control}, diverged in {rows[control].count(None)} of {len(rows[control])} runs"
    elif len(rows[control]) < MIN_BLOCKS:
        refusal = too_few_seeds(len(rows[control]))
    elif len(names) > 1:
        model = fit_additive_model(np.array([rows[name] for name in names], dtype=np.float64), confidence)
        if model is None:
            refusal = "there is no noise to estimate: all seeds give the same differences"
        else:
            residual_sd, contrasts = model
    control_mean = _complete_mean(rows[control])
    absolute_margin = None if control_mean is None else margin * abs(control_mean)
    for name, contrast in zip(names[1:], contrasts, strict=False):
        statistic = contrast.difference / contrast.standard_error
        results[name] = replace(
            results[name],
            difference=contrast.difference,
            low=contrast.low,
            high=contrast.high,
            p_value=dunnett_p_value(statistic, len(contrasts), contrast.degrees_of_freedom),
            verdict=_verdict(contrast, absolute_margin or 0.0, lower_is_better),
            standard_error=contrast.standard_error,
            degrees_of_freedom=contrast.degrees_of_freedom,
            critical_value=contrast.critical_value,
            detectable=contrast.detectable,
        )
    comparison = Comparison(
        control=control,
        num_blocks=len(rows[control]),
        confidence=confidence,
        lower_is_better=lower_is_better,
        unit=unit,
        margin=absolute_margin,
        relative_margin=margin,
        residual_sd=residual_sd,
        detectable=max((contrast.detectable for contrast in contrasts), default=None),
        variants=tuple(results.values()),
        warnings=tuple(
            f"{name} is identical to {control}, but their losses differ: runs are not reproducible here"
            for name in rows
            if name in identical and rows[name] != rows[control]
        ),
        refusal=refusal,
    )
    sentences = (
        replace(result, sentence=verdict_sentence(result, comparison, time_of=time_of))
        for result in comparison.variants
    )
    return replace(comparison, variants=tuple(sentences))


def _check_table(rows: Mapping[str, Row], control: str, margin: float, identical: Collection[str]) -> None:
    if control not in rows:
        raise InputError("control", expected=f"one of the variants {list(rows)}", got=control)
    if len(rows) < 2:
        raise InputError("losses", expected="those of the baseline and at least one other variant", got=list(rows))
    if isinstance(identical, str) or not set(identical) <= set(rows) - {control}:
        raise InputError("identical", expected=f"variants other than the baseline, of {list(rows)}", got=identical)
    lengths = {name: len(row) for name, row in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[control]:
        hint = "Use None where a run diverged."
        raise InputError("losses", expected="one number per seed for every variant", got=lengths, hint=hint)
    for name, row in rows.items():
        for value in row:
            if value is not None and not abs(value) < _LARGEST_LOSS:
                expected = f"finite and below {_LARGEST_LOSS:g}"
                raise InputError(f"losses[{name}]", expected=expected, got=value, hint="Use None where a run diverged.")
    if not 0 <= margin < math.inf:
        raise InputError("margin", expected="a share of the baseline's mean, at least 0", got=margin)


def _unjudged(name: str, rows: Mapping[str, Row], control: str, identical: Collection[str]) -> VariantResult:
    """Return a variant's result without the model; the model decides those that are `undecided`."""
    row, control_mean = rows[name], _complete_mean(rows[control])
    # A different variant may equal a baseline that never varies, such as an accuracy of 1 under every seed.
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
    """Return the mean of a row; None if a run diverged."""
    ended = [value for value in row if value is not None]
    return mean_and_sd(ended)[0] if len(ended) == len(row) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """A variant's difference from the baseline, with its error."""

    difference: float
    standard_error: float
    degrees_of_freedom: float
    critical_value: float

    @property
    def low(self) -> float:
        """Lower end of the simultaneous interval."""
        return self.difference - self.critical_value * self.standard_error

    @property
    def high(self) -> float:
        """Upper end of the simultaneous interval."""
        return self.difference + self.critical_value * self.standard_error

    @property
    def detectable(self) -> float:
        """Minimum detectable effect at 80 % power, taking the estimated variance as true."""
        return self.standard_error * detectable_noncentrality(self.critical_value, self.degrees_of_freedom, POWER)


def fit_additive_model(table: Array, confidence: float) -> tuple[float, list[Contrast]] | None:
    """Fit the additive model of variant and seed to a table (variant, seed), the baseline first.

    Return the residual standard deviation, and a contrast for each variant except the baseline; None if all residuals
    are zero. The confidence is that of all intervals together.
    """
    num_variants, num_seeds = table.shape
    centered = table - table.mean(axis=0)
    residual = centered - centered.mean(axis=1, keepdims=True)
    variances = (residual**2).sum(axis=1) * num_variants / ((num_variants - 1) * (num_seeds - 1))
    residual_sd = math.sqrt(float(variances.mean()))
    if residual_sd <= 1e-14 * float(np.abs(table).max()):
        return None
    shrunk = ((num_seeds - 1) * variances + variances.mean()) / num_seeds
    standard_errors = np.sqrt((shrunk[1:] + max(shrunk[0], variances[0])) / num_seeds).tolist()
    differences = (table[1:] - table[0]).mean(axis=1).tolist()
    return residual_sd, [
        Contrast(
            difference=difference,
            standard_error=standard_error,
            degrees_of_freedom=degrees,
            critical_value=dunnett_critical_value(num_variants - 1, degrees, confidence),
        )
        for difference, standard_error, degrees in zip(
            differences, standard_errors, degrees_of_freedom(shrunk, num_seeds), strict=True
        )
    ]


def _verdict(contrast: Contrast, margin: float, lower_is_better: bool) -> VerdictWord:
    if -margin < contrast.low and contrast.high < margin:
        return "equivalent"
    if contrast.low <= 0 <= contrast.high:
        return "inconclusive"
    return "better" if (contrast.high < 0) == lower_is_better else "worse"
