r"""Does a variant differ from the control, by how much, and how surely? From plain numbers.

Seeds are blocks. The figure of variant v under seed b is $y_{vb} = \mu + \alpha_v + \beta_b + \varepsilon_{vb}$; the
residual of this table measures the noise, with (V - 1)(S - 1) degrees of freedom for V variants and S seeds, however
far the seeds lie apart. All intervals hold at once, by the distribution of the largest of the V - 1 differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from scipy import special

from tidegate._validation import InputError
from tidegate._verdict import VerdictWord
from tidegate.lab.judging.distributions import (
    Array,
    check_confidence,
    detectable_noncentrality,
    dunnett_critical_value,
    dunnett_p_value,
    mean_and_sd,
    student_critical_value,
    student_p_value,
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
_SPREAD_LEVEL = 0.1
"""Level of the F test for unequal spread: once for the control, once shared by the variants.
With less, unequal spreads that stay unseen make false verdicts more frequent; with more, clear differences get lost."""


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
    own_low: float | None = None
    own_high: float | None = None
    """Ends of the interval from this variant's and the control's runs alone: paired t, Bonferroni's adjustment."""
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
    pooled: bool = True
    """Whether all are judged by the table's residual; if spreads are unequal, each is by its own differences."""
    degrees_of_freedom: int | None = None
    """Degrees of freedom of the judging error; this and the next three are None if nothing was judged."""
    residual_sd: float | None = None
    critical_value: float | None = None
    """The intervals' half-width in standard errors: Dunnett's, or Student's for a share of the level."""
    detectable: float | None = None
    """Difference detected with 80 % power, taking the estimated spread as true; if not pooled, the largest of the
    variants'."""
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
    error = None
    if model is not None and absolute_margin is not None:
        error = model.pooled if model.widest is None else model.own[0]
        for index, name in enumerate(names[1:]):
            results[name] = _judge(results[name], model, index, absolute_margin, lower_is_better)
    comparison = Comparison(
        control=control,
        num_blocks=len(rows[control]),
        confidence=confidence,
        lower_is_better=lower_is_better,
        unit=unit,
        margin=absolute_margin,
        relative_margin=margin,
        pooled=model is None or model.widest is None,
        degrees_of_freedom=None if error is None else error.degrees_of_freedom,
        residual_sd=None if model is None else model.residual_sd,
        critical_value=None if error is None else error.critical_value,
        detectable=max(
            (result.detectable for result in results.values() if result.detectable is not None), default=None
        ),
        variants=tuple(results.values()),
        warnings=tuple(_warnings(rows, control, identical, model, names)),
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
    degrees_of_freedom: int
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
    """One for each variant but the control, like `own`."""
    pooled: ErrorEstimate
    own: tuple[ErrorEstimate, ...]
    rounding: float
    """What is smaller than this is zero."""
    widest: int | None
    """Row of the table whose residuals spread wider than chance allows; 0 is the control."""
    spread_ratio: float

    def error(self, index: int) -> ErrorEstimate:
        """Return the error of a variant's difference; the index leaves the control out."""
        own = self.own[index]
        # Differences equal under every seed give no noise estimate: use the pooled one.
        return own if self.widest is not None and own.standard_error > self.rounding else self.pooled


def fit_additive_model(table: Array, confidence: float) -> AdditiveModel | None:
    """Fit the additive model to (variant, seed), the control first; None if the residual is zero but for rounding."""
    num_variants, num_blocks = table.shape
    centred = table - table.mean(axis=0)
    residual = centred - centred.mean(axis=1, keepdims=True)
    degrees, own_degrees = (num_variants - 1) * (num_blocks - 1), num_blocks - 1
    residual_sd = math.sqrt(float((residual**2).sum()) / degrees)
    rounding = 1e-14 * float(np.abs(table).max())
    if residual_sd <= rounding:
        return None
    paired = table[1:] - table[0]
    own_critical = student_critical_value(own_degrees, (1 - confidence) / (num_variants - 1))
    widest, spread_ratio = _widest(residual)
    return AdditiveModel(
        residual_sd=residual_sd,
        differences=tuple(paired.mean(axis=1).tolist()),
        pooled=ErrorEstimate(
            standard_error=residual_sd * math.sqrt(2 / num_blocks),
            degrees_of_freedom=degrees,
            critical_value=dunnett_critical_value(num_variants - 1, degrees, confidence),
        ),
        own=tuple(
            ErrorEstimate(
                standard_error=sd / math.sqrt(num_blocks), degrees_of_freedom=own_degrees, critical_value=own_critical
            )
            for sd in paired.std(axis=1, ddof=1).tolist()
        ),
        rounding=rounding,
        widest=widest,
        spread_ratio=spread_ratio,
    )


def _widest(residual: Array) -> tuple[int | None, float]:
    r"""Return the variant whose residuals spread wider than the others' do, if one does, and how many times as wide.

    The contrast of one variant with the mean of the others takes $\frac{V}{V-1} \sum_b r_{vb}^2$ of the residual sum
    of squares; the rest is that of the table without it. For equal spreads their mean squares' ratio has exactly an F
    distribution, with S - 1 and (V - 2)(S - 1) degrees of freedom. With two variants there is no rest, and no need:
    the pooled interval is the paired one.
    """
    num_variants, num_blocks = residual.shape
    if num_variants < 3:
        return None, 1.0
    degrees, rest_degrees = num_blocks - 1, (num_variants - 2) * (num_blocks - 1)
    own = (residual**2).sum(axis=1) * num_variants / (num_variants - 1)
    total = (residual**2).sum()
    rest = np.maximum(total - own, 1e-16 * total)
    ratios = (own / degrees) / (rest / rest_degrees)
    levels = np.full(num_variants, _SPREAD_LEVEL / (num_variants - 1))
    # The control is in every difference: its spread matters most, and has the level for itself.
    levels[0] = _SPREAD_LEVEL
    wide = special.fdtrc(degrees, rest_degrees, ratios) < levels
    widest = int(np.argmax(np.where(wide, ratios, 0.0)))
    return (widest if wide.any() else None), math.sqrt(ratios[widest])


def _judge(
    result: VariantResult, model: AdditiveModel, index: int, margin: float, lower_is_better: bool
) -> VariantResult:
    """Return a variant's result with the model's verdict on it; the index leaves the control out."""
    difference, own, error = model.differences[index], model.own[index], model.error(index)
    statistic, num_comparisons = difference / error.standard_error, len(model.differences)
    if error is own:
        p_value = min(1.0, num_comparisons * student_p_value(statistic, own.degrees_of_freedom))
    else:
        p_value = dunnett_p_value(statistic, num_comparisons, error.degrees_of_freedom)
    low, high = difference - error.half_width, difference + error.half_width
    return replace(
        result,
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        verdict=_verdict(low, high, margin, lower_is_better),
        own_low=difference - own.half_width,
        own_high=difference + own.half_width,
        detectable=error.detectable,
    )


def _verdict(low: float, high: float, margin: float, lower_is_better: bool) -> VerdictWord:
    if -margin < low and high < margin:
        return "equivalent"
    if low <= 0 <= high:
        return "inconclusive"
    return "better" if (high < 0) == lower_is_better else "worse"


def _warnings(
    rows: Mapping[str, Row], control: str, identical: Collection[str], model: AdditiveModel | None, names: Sequence[str]
) -> Iterator[str]:
    for name in rows:
        if name in identical and rows[name] != rows[control]:
            why = "yet their figures differ: runs are not reproducible here"
            yield f"{name} is said to be identical to {control}, {why}"
    if model is not None and model.widest is not None:
        yield (
            f"the residuals of {names[model.widest]} spread {model.spread_ratio:.1f} times as wide as the others': "
            "each variant is judged by its own differences to the control, with wider intervals than equal spreads "
            "would give"
        )
