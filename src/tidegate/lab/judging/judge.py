r"""Does a variant differ from the control, by how much, and how surely? From plain numbers.

Seeds are blocks. The figure of variant v under seed b is $y_{vb} = \mu + \alpha_v + \beta_b + \varepsilon_{vb}$; the
residual of this table measures the noise, with (V - 1)(S - 1) degrees of freedom for V variants and S seeds, however
far the seeds lie apart. All intervals hold at once, by the distribution of the largest of the V - 1 differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import special

from tidegate._verdict import VerdictWord
from tidegate.lab.judging.distributions import (
    Array,
    detectable_noncentrality,
    dunnett_critical_value,
    dunnett_p_value,
    mean_and_sd,
    require_confidence,
    student_critical_value,
    student_p_value,
)

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
    """The verdict in words; empty until `words` has written it."""
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
    """Reason the whole comparison is refused; empty if it is not."""

    def __getitem__(self, name: str) -> VariantResult:
        """The result of the variant of that name."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(f"no variant {name!r} in this comparison; there are {[v.name for v in self.variants]}.")


def judge_variants(
    losses: Mapping[str, Sequence[float | None]],
    *,
    control: str,
    margin: float,
    confidence: float,
    identical: Collection[str],
    lower_is_better: bool,
    unit: str,
) -> Comparison:
    """Judge every variant against the control; `compare_to_control` explains the arguments and adds sentences."""
    require_confidence(confidence)
    rows: dict[str, Row] = {name: tuple(row) for name, row in losses.items()}
    _require_table(rows, control, margin, identical)
    control_mean = _complete_mean(rows[control])
    outcomes: dict[str, VerdictWord] = {name: _outcome(name, rows, control, identical) for name in rows}
    # The table that the model is fitted to: those that are identical or diverged are left out.
    names = [control, *(name for name, outcome in outcomes.items() if outcome == "undecided")]
    refusal, model = _refusal(rows[control], control), None
    if not refusal and len(names) > 1:
        model = fit_table(np.array([rows[name] for name in names], dtype=np.float64), confidence)
        if model is None:
            refusal = "no noise is left to judge by: every seed gives the same differences"
    absolute_margin = None if control_mean is None else margin * abs(control_mean)
    judgements: dict[str, _Judgement] = {}
    if model is not None:
        assert absolute_margin is not None
        judgements = {
            name: _judgement(model, index, absolute_margin, lower_is_better) for index, name in enumerate(names[1:])
        }
    yardstick = None if model is None else model.own[0] if model.widest is not None else model.pooled
    return Comparison(
        control=control,
        num_blocks=len(rows[control]),
        confidence=confidence,
        lower_is_better=lower_is_better,
        unit=unit,
        margin=absolute_margin,
        relative_margin=margin,
        pooled=model is None or model.widest is None,
        degrees_of_freedom=None if yardstick is None else yardstick.degrees_of_freedom,
        residual_sd=None if model is None else model.residual_sd,
        critical_value=None if yardstick is None else yardstick.critical_value,
        detectable=max((judgement.detectable for judgement in judgements.values()), default=None),
        variants=tuple(
            _result(name, row, outcomes[name], control_mean, judgements.get(name)) for name, row in rows.items()
        ),
        warnings=(*_identity_warnings(rows, control, identical), *_spread_warnings(model, names)),
        refusal=refusal,
    )


def _require_table(rows: Mapping[str, Row], control: str, margin: float, identical: Collection[str]) -> None:
    if control not in rows:
        raise ValueError(f"control must be one of the variants {list(rows)}; got {control!r}.")
    if len(rows) < 2:
        raise ValueError(f"losses has the control {control!r} alone; give at least one variant to compare with it.")
    if isinstance(identical, str) or not set(identical) <= set(rows) - {control}:
        raise ValueError(f"identical must name variants other than the control, of {list(rows)}; got {identical!r}.")
    lengths = {name: len(row) for name, row in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[control]:
        raise ValueError(
            f"losses must have one figure for each seed in every variant, None where a run diverged; got {lengths}."
        )
    for name, row in rows.items():
        for value in row:
            if value is not None and not abs(value) < _LARGEST_LOSS:
                raise ValueError(
                    f"losses of {name!r} must be finite and below {_LARGEST_LOSS:g}, or None where the run diverged; "
                    f"got {value!r}."
                )
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a share of the control's mean, 0 or more; got {margin!r}.")


def _outcome(name: str, rows: Mapping[str, Row], control: str, identical: Collection[str]) -> VerdictWord:
    """What can be said of a variant without the model; `undecided` is for the model to decide."""
    if name == control:
        return "control"
    # A control that never varies (an accuracy of 1 under every seed) may well be equalled by something else.
    control_varies = len(set(rows[control])) > 1
    if name in identical or (control_varies and rows[name] == rows[control]):
        return "identical"
    return "diverged" if None in rows[name] else "undecided"


def _refusal(row: Row, control: str) -> str:
    if None in row:
        return f"the control, {control}, diverged in {row.count(None)} of {len(row)} runs"
    if len(row) < MIN_BLOCKS:
        return f"a verdict needs at least {MIN_BLOCKS} seeds, and there are {len(row)}"
    return ""


def _complete_mean(row: Row) -> float | None:
    """Mean of a row without divergence; None of others."""
    ended = [value for value in row if value is not None]
    return mean_and_sd(ended)[0] if len(ended) == len(row) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Yardstick:
    """What a difference is held against."""

    standard_error: float
    degrees_of_freedom: int
    critical_value: float

    @property
    def half_width(self) -> float:
        """Of the interval."""
        return self.critical_value * self.standard_error

    @property
    def detectable(self) -> float:
        """Difference detected with 80 % power, taking the estimated spread as true; in the unit of the figures."""
        return self.standard_error * detectable_noncentrality(self.critical_value, self.degrees_of_freedom, POWER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """The fitted table."""

    residual_sd: float
    differences: tuple[float, ...]
    """One for each variant but the control, like `own`."""
    pooled: _Yardstick
    own: tuple[_Yardstick, ...]
    rounding: float
    """What is smaller than this is zero."""
    widest: int | None
    """Row of the table whose residuals spread wider than chance allows; 0 is the control."""
    spread_ratio: float

    def yardstick(self, index: int) -> _Yardstick:
        """What the difference of a variant is held against; the index leaves the control out."""
        own = self.own[index]
        # Differences equal under every seed give no noise estimate: use the pooled one.
        return own if self.widest is not None and own.standard_error > self.rounding else self.pooled


def fit_table(table: Array, confidence: float) -> _Model | None:
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
    return _Model(
        residual_sd=residual_sd,
        differences=tuple(paired.mean(axis=1).tolist()),
        pooled=_Yardstick(
            standard_error=residual_sd * math.sqrt(2 / num_blocks),
            degrees_of_freedom=degrees,
            critical_value=dunnett_critical_value(num_variants - 1, degrees, confidence),
        ),
        own=tuple(
            _Yardstick(
                standard_error=sd / math.sqrt(num_blocks), degrees_of_freedom=own_degrees, critical_value=own_critical
            )
            for sd in paired.std(axis=1, ddof=1).tolist()
        ),
        rounding=rounding,
        widest=widest,
        spread_ratio=spread_ratio,
    )


def _widest(residual: Array) -> tuple[int | None, float]:
    r"""The variant whose residuals spread wider than the others' do, if one does, and how many times as wide.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judgement:
    """What the model says of one variant, under the names that `VariantResult` has."""

    difference: float
    low: float
    high: float
    p_value: float
    verdict: VerdictWord
    own_low: float
    own_high: float
    detectable: float


def _judgement(model: _Model, index: int, margin: float, lower_is_better: bool) -> _Judgement:
    """Judge one variant of the table.

    index : among the variants without the control
    """
    difference, own, yardstick = model.differences[index], model.own[index], model.yardstick(index)
    statistic, num_comparisons = difference / yardstick.standard_error, len(model.differences)
    if yardstick is own:
        p_value = min(1.0, num_comparisons * student_p_value(statistic, own.degrees_of_freedom))
    else:
        p_value = dunnett_p_value(statistic, num_comparisons, yardstick.degrees_of_freedom)
    low, high = difference - yardstick.half_width, difference + yardstick.half_width
    return _Judgement(
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        verdict=_verdict(low, high, margin, lower_is_better),
        own_low=difference - own.half_width,
        own_high=difference + own.half_width,
        detectable=yardstick.detectable,
    )


def _verdict(low: float, high: float, margin: float, lower_is_better: bool) -> VerdictWord:
    if -margin < low and high < margin:
        return "equivalent"
    if low <= 0 <= high:
        return "inconclusive"
    return "better" if (high < 0) == lower_is_better else "worse"


def _result(
    name: str, row: Row, outcome: VerdictWord, control_mean: float | None, judgement: _Judgement | None
) -> VariantResult:
    ended = [value for value in row if value is not None]
    mean, sd = mean_and_sd(ended) if ended else (None, None)
    complete = _complete_mean(row)
    difference = None
    if control_mean is not None and complete is not None and outcome != "control":
        difference = complete - control_mean
    return VariantResult(
        name=name,
        mean=mean,
        sd=sd,
        difference=difference if judgement is None else judgement.difference,
        relative_difference=difference / abs(control_mean) if control_mean and difference is not None else None,
        low=None if judgement is None else judgement.low,
        high=None if judgement is None else judgement.high,
        p_value=None if judgement is None else judgement.p_value,
        verdict=outcome if judgement is None else judgement.verdict,
        num_diverged=row.count(None),
        own_low=None if judgement is None else judgement.own_low,
        own_high=None if judgement is None else judgement.own_high,
        detectable=None if judgement is None else judgement.detectable,
    )


def _identity_warnings(rows: Mapping[str, Row], control: str, identical: Collection[str]) -> list[str]:
    return [
        f"{name} is said to be identical to {control}, yet their figures differ: runs are not reproducible here"
        for name in rows
        if name in identical and rows[name] != rows[control]
    ]


def _spread_warnings(model: _Model | None, names: Sequence[str]) -> list[str]:
    if model is None or model.widest is None:
        return []
    return [
        f"the residuals of {names[model.widest]} spread {model.spread_ratio:.1f} times as wide as the others': each "
        "variant is judged by its own differences to the control, with wider intervals than equal spreads would give"
    ]


def false_positive_rate(
    noise: Sequence[float],
    *,
    num_variants: int = 4,
    num_blocks: int = 5,
    num_comparisons: int = 200,
    seed: int = 0,
    margin: float = MARGIN,
) -> float:
    """Share of comparisons without any difference in which some variant's interval excludes zero.

    noise : figures of one and the same variant under many seeds. Each comparison draws its cells from them, none twice
            in one table; different tables share figures, so that the share is about this noise and no other
    """
    num_cells = num_variants * num_blocks
    if num_variants < 2 or num_blocks < MIN_BLOCKS or num_comparisons < 1:
        raise ValueError(
            "num_variants must be at least 2, num_blocks at least 3 and num_comparisons at least 1; "
            f"got {num_variants}, {num_blocks} and {num_comparisons}."
        )
    if len(noise) < num_cells:
        raise ValueError(f"noise must have a figure for each of the {num_cells} cells of a table; got {len(noise)}.")
    generator = np.random.default_rng(seed)
    found = 0
    for _ in range(num_comparisons):
        cells = generator.choice(np.asarray(noise, dtype=np.float64), size=num_cells, replace=False)
        table = {str(index): row for index, row in enumerate(cells.reshape(num_variants, num_blocks).tolist())}
        comparison = judge_variants(
            table, control="0", margin=margin, confidence=0.95, identical=(), lower_is_better=True, unit=""
        )
        found += any(_excludes_zero(variant) for variant in comparison.variants)
    return found / num_comparisons


def _excludes_zero(variant: VariantResult) -> bool:
    return variant.low is not None and variant.high is not None and not variant.low <= 0 <= variant.high
