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
    "outside an interval are ruled out. The variance of a difference is the sum of the variant's and the baseline's "
    "residual variances in the variant × seed table, each averaged with the mean over all variants, which counts as "
    "one of the seeds (the baseline's only if that raises it). Degrees of freedom are Welch–Satterthwaite; the "
    "critical value is Dunnett's. Equivalent: the interval lies within the margin, ±{margin}. Better or worse: it "
    "excludes zero and does not lie within the margin. Inconclusive: neither. A variant with a diverged run, or "
    "identical to the baseline, is not tested. There is no verdict with fewer than three seeds or if the baseline "
    "diverged. Seeds are counted for detecting the estimate, or the margin if that is larger, with 80 % power at the "
    "variance estimated here. Verdicts are reached once, after the last run."
)
"""The rule of the verdicts; `rule_text` fills in its numbers."""


def rule_text(comparison: Comparison) -> str:
    """Return the rule with the numbers of one comparison, for readers of its page."""

    def show(number: float) -> str:
        decimals = min(max(4, 1 - math.floor(math.log10(comparison.detectable or 1.0))), 15)
        return f"{number:.{decimals}f} {comparison.unit}".rstrip()

    share = f"{_percent(comparison.relative_margin)} of its mean"
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
    name, control = variant.name, comparison.control
    seeds = _seeds(comparison)
    match variant.verdict:
        case "control":
            return f"{name} is the baseline: {_mean_words(variant, comparison)}"
        case "identical":
            return f"{name} is identical to {control} and was not tested"
        case "diverged":
            return f"{name} diverged in {variant.num_diverged} of {seeds} and was not tested"
        case "undecided":
            start = f"{name} has" if variant.difference is None else f"{_change(variant, comparison)}:"
            return f"{start} no verdict, because {comparison.refusal}"
        case "inconclusive":
            words = f"no significant difference; {_ruled_out(variant, comparison)}"
            words += _seeds_words(variant, comparison, time_of)
        case "equivalent":
            words = f"equivalent to {control} within ±{_percent(comparison.relative_margin)}"
            if variant.p_value is not None and variant.p_value < 1 - comparison.confidence:
                words += " (the difference is significant but smaller than the margin)"
            words += f"; {_ruled_out(variant, comparison)}"
        case verdict:
            words = f"significantly {verdict} than {control}; {_ruled_out(variant, comparison)}"
    return f"{_change(variant, comparison)}: {words}"


def effect_sentence(
    variant: VariantResult, placebos: Sequence[PlaceboResult], effect: Effect, comparison: Comparison
) -> str:
    """Return a sentence on the evidence that a variant's mechanism makes the difference; empty without a placebo."""
    if not placebos:
        return ""
    control = comparison.control
    contrasts: list[tuple[str, VariantResult | PlaceboResult]] = [(control, variant)]
    contrasts += [(f"its placebo ({own.placebo}) individually", own) for own in placebos if own.placebo != control]
    parts = [f"{estimate_words(result, comparison)} compared with {other}" for other, result in contrasts]
    found = {"helps": "helps", "harms": "harms", "not shown": "is not shown to help or to harm"}[effect]
    if effect != "not shown" and variant.verdict == "equivalent":
        found += ", by less than the margin"
    same = f" At initialization it equals {control}, which is its placebo." if placebos[0].placebo == control else ""
    return f"{variant.name}: {'; '.join(parts)}. The mechanism {found}.{same}"


def estimate_words(result: VariantResult | PlaceboResult, comparison: Comparison) -> str:
    """Return a difference and its interval, relative to the baseline, as in "−0.4 % (95 % CI −1.1 % to +0.2 %)"."""
    if result.difference is None:
        return "no estimate"
    show = _formatter(comparison)
    if result.low is None or result.high is None:
        return f"{show(result.difference, '+')} (no interval)"
    interval = f"{show(result.low, '+')} to {show(result.high, '+')}"
    return f"{show(result.difference, '+')} ({_percent(comparison.confidence)} CI {interval})"


def duration(seconds: float) -> str:
    """Return a time in minutes or hours, at least a minute."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours >= 10 or (hours and not minutes):
        return f"{round(seconds / 3600):,} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _change(variant: VariantResult, comparison: Comparison) -> str:
    noun = "loss" if comparison.lower_is_better else "metric"
    return f"{variant.name} changes the {noun} by {estimate_words(variant, comparison)}"


def _mean_words(variant: VariantResult, comparison: Comparison) -> str:
    seeds, unit = _seeds(comparison), comparison.unit and f" {comparison.unit}"
    if variant.num_diverged or variant.mean is None:
        return f"it diverged in {variant.num_diverged} of {seeds}"
    deviation = "" if variant.sd is None else f" (standard deviation {variant.sd:.4f})"
    return f"mean {variant.mean:.4f}{unit}{deviation} over {seeds}"


def _ruled_out(variant: VariantResult, comparison: Comparison) -> str:
    show = _formatter(comparison)
    low, high = variant.low, variant.high
    assert low is not None
    assert high is not None
    loss, gain = (high, -low) if comparison.lower_is_better else (-low, high)
    if loss >= 0 and gain >= 0:
        return f"gains above {show(gain)} and losses above {show(loss)} are ruled out"
    nearest, farthest = sorted((abs(low), abs(high)))
    side = "gains" if gain > 0 else "losses"
    return f"{side} below {show(nearest)} and above {show(farthest)} are ruled out"


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
    return f"; detecting {show(target)} would take {seeds}"


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
