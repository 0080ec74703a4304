"""The sentences of a comparison: one for each variant, one for its placebos, and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidegate._verdict import Effect
from tidegate.lab.judging.power import seeds_needed

if TYPE_CHECKING:
    from tidegate.lab.judging.judge import Comparison, VariantResult
    from tidegate.lab.judging.placebos import PlaceboResult

RULE = (
    "Each variant is compared with the baseline, {control}, under the same {seeds}. Percentages are relative to the "
    "baseline's mean loss. The {confidence} confidence intervals (CI) hold for all variants simultaneously; values "
    "outside an interval are ruled out. The squared standard error of a difference is the sum of the variant's and the "
    "baseline's residual variances in the variant × seed table, divided by the number of seeds. Each variance is a "
    "weighted mean of its own (weight: seeds − 1) and the mean over all variants (weight 1), which never lowers the "
    "baseline's. Degrees of freedom are Welch–Satterthwaite; the critical value is Dunnett's. Equivalent: the "
    "interval lies within the margin, ±{margin}. Better or worse: it "
    "excludes zero and does not lie within the margin. Inconclusive: neither. A variant with a diverged run, or "
    "identical to the baseline, is not tested. There is no verdict with fewer than three seeds or if the baseline "
    "diverged. Seeds are counted for detecting the estimate, or the margin if that is larger, with 80 % power at the "
    "variance estimated here. The error rates hold if verdicts are read once, after a number of seeds fixed before the "
    "runs."
)
"""The rule of the verdicts; `rule_text` fills in its numbers."""


def rule_text(comparison: Comparison) -> str:
    """Return the rule with the numbers of one comparison, for readers of its page."""

    def show(number: float) -> str:
        decimals = min(max(4, 1 - math.floor(math.log10(comparison.detectable or 1.0))), 15)
        return f"{number:.{decimals}f} {comparison.unit}".rstrip()

    share = f"{_percent(comparison.relative_margin)} of the baseline's mean loss"
    text = RULE.format(
        control=comparison.control,
        seeds=_seeds(comparison),
        confidence=_percent(comparison.confidence),
        margin=share if comparison.margin is None else f"{show(comparison.margin)} ({share})",
    )
    if comparison.refusal:
        return f"{text} Here there is no verdict: {comparison.refusal}."
    judged = [variant for variant in comparison.variants if variant.standard_error is not None]
    if not judged or comparison.residual_sd is None or comparison.detectable is None:
        return text
    degrees = _range([variant.degrees_of_freedom or 0.0 for variant in judged], ".1f")
    critical = _range([variant.critical_value or 0.0 for variant in judged], ".3f")
    return (
        f"{text} Here the residual standard deviation is {show(comparison.residual_sd)}, differences have {degrees} "
        f"degrees of freedom and critical values of {critical}, and the largest minimum detectable effect is "
        f"{show(comparison.detectable)} (80 % power, noncentral t)."
    )


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def verdict_sentence(
    variant: VariantResult, comparison: Comparison, *, time_of: Callable[[int], str] | None = None
) -> str:
    """Return a sentence on one variant: the estimate and its interval, the verdict, and what the interval rules out.

    `time_of` returns the time that the comparison takes with a number of seeds, in words; empty if unknown.
    """
    name, seeds = variant.name, _seeds(comparison)
    match variant.verdict:
        case "control":
            return f"{name} is the baseline: {_mean_words(variant, comparison)}"
        case "identical":
            return f"{name} is identical to the baseline and was not tested"
        case "diverged":
            return f"{name} diverged in {variant.num_diverged} of {seeds} and was not tested"
        case "undecided":
            start = f"{name} has" if variant.difference is None else f"{_estimate(variant, comparison)}:"
            return f"{start} no verdict, because {comparison.refusal}"
        case "inconclusive":
            words = f"no significant difference; {_ruled_out(variant, comparison)}"
            words += _seeds_words(variant, comparison, time_of)
            return f"{_estimate(variant, comparison)}: {words}"
        case "equivalent":
            words = f"equivalent to the baseline within ±{_percent(comparison.relative_margin)}"
            if variant.p_value is not None and variant.p_value < 1 - comparison.confidence:
                words += " (the difference is significant but smaller than the margin)"
            else:
                words += f"; {_ruled_out(variant, comparison)}"
            return f"{_estimate(variant, comparison)}: {words}"
        case verdict:
            show = _formatter(comparison)
            nearest, farthest = sorted((abs(variant.low or 0.0), abs(variant.high or 0.0)))
            words = f"significantly {verdict} than the baseline, by {show(nearest)} to {show(farthest)}"
    change = estimate_words(variant, comparison)
    return f"{name} changes the {_noun(comparison)} by {change}: {words}"


def effect_sentence(
    variant: VariantResult, placebos: Sequence[PlaceboResult], effect: Effect, comparison: Comparison
) -> str:
    """Return a sentence on the evidence that a variant's mechanism makes the difference; empty without a placebo."""
    if not placebos:
        return ""
    control = comparison.control
    contrasts: list[tuple[str, VariantResult | PlaceboResult]] = [("the baseline", variant)]
    contrasts += [(f"its placebo {own.placebo}", own) for own in placebos if own.placebo != control]
    parts = [f"{estimate_words(result, comparison)} compared with {other}" for other, result in contrasts]
    found = effect if effect != "not shown" else f"is not shown to help or to harm: {_missing(contrasts)}"
    if effect != "not shown" and variant.verdict == "equivalent":
        found += ", by less than the margin"
    same = " At initialization it equals the baseline, which is its placebo." if placebos[0].placebo == control else ""
    return f"{variant.name}: {'; '.join(parts)}. The mechanism {found}.{same}"


def _missing(contrasts: Sequence[tuple[str, VariantResult | PlaceboResult]]) -> str:
    """Return the reason why a mechanism is not shown to help or to harm."""
    untested = [other for other, result in contrasts if result.low is None or result.high is None]
    if untested:
        return f"there is no interval against {' and '.join(untested)}"
    open_ = [other for other, result in contrasts if (result.low or 0.0) <= 0 <= (result.high or 0.0)]
    if open_:
        words = "the interval against {} includes 0" if len(open_) == 1 else "the intervals against {} include 0"
        return words.format(" and ".join(open_))
    return "the intervals lie on different sides of 0"


def estimate_words(result: VariantResult | PlaceboResult, comparison: Comparison) -> str:
    """Return a difference and its interval, relative to the baseline, as in "−0.4 % (95 % CI −1.1 % to +0.2 %)"."""
    if result.difference is None:
        return "no estimate"
    show = _formatter(comparison)
    if result.low is None or result.high is None:
        return f"{show(result.difference, '+')} (no interval)"
    interval = f"{show(result.low, '+')} to {show(result.high, '+')}"
    return f"{show(result.difference, '+')} ({_percent(comparison.confidence)} CI {interval})"


def interval_words(results: Sequence[VariantResult], comparison: Comparison) -> str:
    """Return the range of the intervals of several differences, as in "95 % CIs within −1.1 % to +0.2 %"."""
    show, confidence = _formatter(comparison), _percent(comparison.confidence)
    low = min(result.low for result in results if result.low is not None)
    high = max(result.high for result in results if result.high is not None)
    return f"{confidence} {'CI' if len(results) == 1 else 'CIs within'} {show(low, '+')} to {show(high, '+')}"


def duration(seconds: float) -> str:
    """Return a time in minutes or hours, at least a minute."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours >= 10 or (hours and not minutes):
        return f"{round(seconds / 3600):,} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _noun(comparison: Comparison) -> str:
    return "loss" if comparison.lower_is_better else "metric"


def _estimate(variant: VariantResult, comparison: Comparison) -> str:
    estimate = estimate_words(variant, comparison)
    return f"{variant.name} has an estimated effect on the {_noun(comparison)} of {estimate}"


def _mean_words(variant: VariantResult, comparison: Comparison) -> str:
    seeds, unit = _seeds(comparison), comparison.unit and f" {comparison.unit}"
    if variant.num_diverged or variant.mean is None:
        return f"it diverged in {variant.num_diverged} of {seeds}"
    deviation = "" if variant.sd is None else f" (standard deviation {variant.sd:.4f})"
    return f"mean {variant.mean:.4f}{unit}{deviation} over {seeds}"


def _ruled_out(variant: VariantResult, comparison: Comparison) -> str:
    show = _formatter(comparison)
    assert variant.low is not None
    assert variant.high is not None
    return f"a decrease of more than {show(-variant.low)} or an increase of more than {show(variant.high)} is ruled out"


def _seeds_words(variant: VariantResult, comparison: Comparison, time_of: Callable[[int], str] | None) -> str:
    """Return the number of seeds that detect the estimate, or the margin if that is larger."""
    target, show = max(abs(variant.difference or 0.0), comparison.margin or 0.0), _formatter(comparison)
    if variant.standard_error is None or show(target) == show(0.0):
        return ""
    needed = seeds_needed(
        variant.standard_error * math.sqrt(comparison.num_blocks),
        target,
        num_comparisons=sum(each.standard_error is not None for each in comparison.variants),
        confidence=comparison.confidence,
    )
    # The formula assumes equal variances; with unequal ones, more seeds are needed than it gives.
    if needed is not None and needed <= comparison.num_blocks:
        return ""
    time = time_of(needed) if needed and time_of else ""
    seeds = f"{needed} seeds{time and f' ({time})'}" if needed else "more than 1,000 seeds"
    sought = "a difference" if abs(variant.difference or 0.0) >= (comparison.margin or 0.0) else "the margin"
    return f"; detecting {sought} of {show(target)} would take {seeds}"


def _formatter(comparison: Comparison) -> Callable[..., str]:
    """Return a function that formats differences as percentages of the baseline's mean, or in their unit if it is 0."""
    baseline = comparison[comparison.control].mean
    scale, unit = (100 / abs(baseline), "%") if baseline else (1.0, comparison.unit)
    halves = [own.standard_error * (own.critical_value or 1.0) for own in comparison.variants if own.standard_error]
    # Two digits of the narrowest interval's half-width.
    decimals = min(max(1, 1 - math.floor(math.log10(scale * min(halves)))), 15) if halves else 2

    def show(number: float, sign: str = "") -> str:
        # z: a number that rounds to zero has no minus.
        return f"{scale * number:{sign}z.{decimals}f} {unit}".rstrip().replace("-", "−")

    return show


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def _seeds(comparison: Comparison) -> str:
    return f"{comparison.num_blocks} seed{'s' * (comparison.num_blocks != 1)}"
