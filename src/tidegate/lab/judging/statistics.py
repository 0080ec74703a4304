r"""Does a variant differ from the control, by how much, and how surely? From plain numbers.

Seeds are blocks. The figure of variant v under seed b is $y_{vb} = \mu + \alpha_v + \beta_b + \varepsilon_{vb}$; the
residual of this table measures the noise, with (V - 1)(S - 1) degrees of freedom for V variants and S seeds, however
far the seeds lie apart. All intervals hold at once, by the distribution of the largest of the V - 1 differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from tidegate.lab.judging.outcomes import MIN_BLOCKS, Rows, describe, mean_and_sd
from tidegate.lab.judging.verdicts import Comparison, VariantResult, with_sentences
from tidegate.report.page import VerdictWord

Array: TypeAlias = NDArray[np.float64]

_POWER = 0.8
_SPREAD_LEVEL = 0.1
"""Chance that a control whose spread is the others' is taken to be noisier; as much again for all variants together.
With less, unequal spreads that stay unseen make false verdicts more frequent; with more, clear differences get lost."""


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of independent numbers, of which there are at least two."""
    _require_confidence(confidence)
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two values; got {len(values)}.")
    mean, sd = mean_and_sd(values)
    half = _student(len(values) - 1, 1 - confidence) * (sd or 0.0) / math.sqrt(len(values))
    return mean - half, mean + half


def dunnett_p_value(statistic: float, num_comparisons: int, degrees_of_freedom: int) -> float:
    r"""$P(\max_i |T_i| \ge t)$ for k differences with one control, each over its estimated standard error.

    $T_i = (Z_i - Z_0) / (\sqrt 2\, s)$ with independent standard normal $Z$ and $s^2$ a chi-square over its degrees of
    freedom, so that any two have the correlation 1/2. Two nested trapezoidal sums, over $|Z_0|$ and $\log s$: both
    integrands are analytic and vanish at the ends, where such sums converge faster than any power of the step.
    With k = 1 it is Student's two-sided p-value. Right to rounding down to p = 1e-15, below that in magnitude only.
    """
    if num_comparisons < 1 or degrees_of_freedom < 1:
        raise ValueError(
            "num_comparisons and degrees_of_freedom must be at least 1; "
            f"got {num_comparisons!r} and {degrees_of_freedom!r}."
        )
    z, z_weights, s, s_weights = _nodes(degrees_of_freedom)
    reach = math.sqrt(2) * abs(statistic) * s[:, None]
    outside = np.minimum(special.ndtr(z - reach) + special.ndtr(-z - reach), 1 - 2**-53)
    any_outside = -np.expm1(num_comparisons * np.log1p(-outside))
    return float(s_weights @ (any_outside @ z_weights))


@lru_cache(maxsize=64)
def dunnett_critical_value(num_comparisons: int, degrees_of_freedom: int, confidence: float = 0.95) -> float:
    """The t at which `dunnett_p_value` is one minus the confidence."""
    _require_confidence(confidence)
    level = 1 - confidence
    # One comparison needs no less, and Bonferroni's adjustment no more.
    low, high = (_student(degrees_of_freedom, level / share) for share in (1, num_comparisons))
    if num_comparisons == 1:
        return low
    found: Any = optimize.brentq(
        lambda t: dunnett_p_value(t, num_comparisons, degrees_of_freedom) - level, low, high, xtol=1e-12
    )
    return float(found)


@lru_cache(maxsize=64)
def _nodes(degrees_of_freedom: int) -> tuple[Array, Array, Array, Array]:
    """Nodes and weights of |Z| and of s."""
    z = np.linspace(0, 9, 55)
    z_weights = np.exp(-(z**2) / 2)
    z_weights[0] /= 2
    # Beyond these ends the density of log s is below exp(-45) of its peak at 0.
    width = math.sqrt(45 / degrees_of_freedom)
    log_s = np.arange(-width * (1 + width), width, 0.12 / math.sqrt(degrees_of_freedom))
    s_weights = np.exp(degrees_of_freedom * (log_s - np.expm1(2 * log_s) / 2))
    return z, z_weights / z_weights.sum(), np.exp(log_s), s_weights / s_weights.sum()


def compare_to_control(
    losses: Mapping[str, Sequence[float | None]],
    *,
    control: str,
    margin: float = 0.005,
    confidence: float = 0.95,
    identical: Collection[str] = (),
    lower_is_better: bool = True,
    unit: str = "",
) -> Comparison:
    """Judge every variant against the control; `rule_text` says by which rule.

    losses    : for each variant one figure for each seed, in one order of seeds; None where the run diverged
    margin    : half-width of the band of no importance, as a share of the control's mean
    identical : variants known to be the control under another name. One whose figures are the control's in every run,
                while they vary from run to run, is found without being named
    unit      : of the figures, for the sentences

    A variant that is identical or has a diverged run is left out of the table before the model is fitted. Nobody is
    judged if the control has a diverged run, if there are fewer than three seeds, or if the residual is zero.
    """
    _require_confidence(confidence)
    rows = {name: tuple(row) for name, row in losses.items()}
    described = describe(rows, control=control, margin=margin, identical=identical)
    described = replace(described, confidence=confidence, lower_is_better=lower_is_better, unit=unit)
    return with_sentences(_judged(described, rows))


def _judged(comparison: Comparison, rows: Rows) -> Comparison:
    names = [variant.name for variant in comparison.variants if variant.verdict == "undecided"]
    if comparison.refusal or not names:
        return comparison
    names.insert(0, comparison.control)
    model = _fit(np.array([rows[name] for name in names], dtype=np.float64), comparison.confidence)
    if model is None:
        return replace(comparison, refusal="no noise is left to judge by: every seed gives the same differences")
    variants = tuple(
        _with_verdict(variant, model, names.index(variant.name) - 1, comparison)
        if variant.verdict == "undecided"
        else variant
        for variant in comparison.variants
    )
    yardstick = model.own[0] if model.widest is not None else model.pooled
    return replace(
        comparison,
        pooled=model.widest is None,
        degrees_of_freedom=yardstick.degrees_of_freedom,
        residual_sd=model.residual_sd,
        critical_value=yardstick.critical_value,
        detectable=max(variant.detectable for variant in variants if variant.detectable is not None),
        variants=variants,
        warnings=(*comparison.warnings, *_spread_warning(model, names)),
    )


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
        """The noncentrality with which t exceeds the critical value 4 times in 5, in the unit of the figures."""
        return self.standard_error * float(special.nctdtrinc(self.degrees_of_freedom, 1 - _POWER, self.critical_value))


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


def _fit(table: Array, confidence: float) -> _Model | None:
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
    own_critical = _student(own_degrees, (1 - confidence) / (num_variants - 1))
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


def _spread_warning(model: _Model, names: Sequence[str]) -> tuple[str, ...]:
    if model.widest is None:
        return ()
    return (
        f"the residuals of {names[model.widest]} spread {model.spread_ratio:.1f} times as wide as the others': each "
        "variant is judged by its own differences to the control, with wider intervals than equal spreads would give",
    )


def _with_verdict(variant: VariantResult, model: _Model, index: int, comparison: Comparison) -> VariantResult:
    difference, own, yardstick = model.differences[index], model.own[index], model.pooled
    num_comparisons, degrees = len(model.differences), yardstick.degrees_of_freedom
    p_value = dunnett_p_value(difference / yardstick.standard_error, num_comparisons, degrees)
    # Differences that are the same under every seed, as between saturated accuracies, do not tell their own noise.
    if model.widest is not None and own.standard_error > model.rounding:
        yardstick = own
        p_value = 2 * float(special.stdtr(own.degrees_of_freedom, -abs(difference / own.standard_error)))
        p_value = min(1.0, num_comparisons * p_value)
    low, high = difference - yardstick.half_width, difference + yardstick.half_width
    assert comparison.margin is not None
    verdict = _verdict(low, high, comparison.margin, comparison.lower_is_better)
    return replace(
        variant,
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        verdict=verdict,
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


def false_positive_rate(
    noise: Sequence[float],
    *,
    num_variants: int = 4,
    num_blocks: int = 5,
    num_comparisons: int = 200,
    seed: int = 0,
    margin: float = 0.005,
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
        comparison = compare_to_control(table, control="0", margin=margin)
        found += any(_excludes_zero(variant) for variant in comparison.variants)
    return found / num_comparisons


def _excludes_zero(variant: VariantResult) -> bool:
    return variant.low is not None and variant.high is not None and not variant.low <= 0 <= variant.high


def _student(degrees_of_freedom: int, level: float) -> float:
    """Two-sided critical value of Student's t."""
    return float(special.stdtrit(degrees_of_freedom, 1 - level / 2))


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, such as 0.95; got {confidence!r}.")
