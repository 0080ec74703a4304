"""The words for what a comparison says: a sentence for each variant, and the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidegate._verdict import Effect

if TYPE_CHECKING:
    from tidegate.lab.judging.judge import Comparison, VariantResult
    from tidegate.lab.judging.placebos import PlaceboResult

RULE = (
    "Each variant is compared with {control} on the same {seeds}; the {confidence} intervals hold for all variants at "
    "once. The variance of a difference is the sum of the variant's and {control}'s residual variances in the variant "
    "× seed table, each averaged with the mean over all variants, which counts as one of the seeds ({control}'s only "
    "where that raises it). Degrees of freedom are Welch–Satterthwaite, the critical value is Dunnett's. Equivalent: "
    "the interval lies within ±{margin}, the margin. Better or worse: it does not, and excludes zero. Inconclusive: "
    "neither. A variant with a diverged run is called diverged, one that is the control under another name identical; "
    "neither enters the table. With fewer than three seeds, or a control that diverged, no verdict is given. The "
    "judgement is made once, after the last run."
)
"""The rule by which variants are judged; `rule_text` fills in its numbers."""


def rule_text(comparison: Comparison) -> str:
    """Return the rule with the numbers of one comparison, for readers of its page."""
    show = _Writer(comparison)
    share = f"{_percent(comparison.relative_margin)} of {comparison.control}'s mean"
    margin = share if comparison.margin is None else f"{show(comparison.margin)} ({share})"
    text = RULE.format(
        control=comparison.control,
        seeds=_seeds(comparison.num_blocks),
        confidence=_percent(comparison.confidence),
        margin=margin,
    )
    if comparison.refusal:
        return f"{text} Here no verdict is given: {comparison.refusal}."
    if comparison.detectable is None or comparison.residual_sd is None:
        return text
    judged = [variant for variant in comparison.variants if variant.standard_error is not None]
    degrees = _range(judged, "degrees_of_freedom", ".1f")
    critical = _range(judged, "critical_value", ".3f")
    return (
        f"{text} Here the residuals have a standard deviation of {show(comparison.residual_sd)}. Differences have "
        f"{degrees} degrees of freedom and critical values of {critical}; a true difference of "
        f"{show(comparison.detectable)} would be detected with 80 % power (noncentral t)."
    )


def _range(variants: Sequence[VariantResult], field: str, form: str) -> str:
    values = [getattr(variant, field) for variant in variants]
    low, high = (format(end, form) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def effect_sentence(
    variant: VariantResult, placebos: Sequence[PlaceboResult], effect: Effect, comparison: Comparison
) -> str:
    """Return a sentence on whether the mechanism makes the difference, and its evidence; empty without a placebo."""
    if not placebos:
        return ""
    show, control = _Writer(comparison), comparison.control
    parts = [f"{_side(variant.low, variant.high)} {control}{_interval(variant.low, variant.high, show)}"]
    for placebo in placebos:
        if placebo.placebo != control:
            against = f"its placebo {placebo.placebo}{_interval(placebo.low, placebo.high, show)}"
            parts.append(f"{_side(placebo.low, placebo.high)} {against}")
    words = " and ".join(parts)
    head = {"helps": "helps", "harms": "harms", "not shown": "is not shown to help or to harm"}[effect]
    if effect != "not shown" and variant.verdict == "equivalent":
        head += " by less than the margin"
    last = "; at the start it is no different from the control" if placebos[0].placebo == control else ""
    return f"The gate of {variant.name} {head}: its loss is {words}{last}."


def _side(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "not comparable with that of"
    return "above that of" if low > 0 else "below that of" if high < 0 else "not told apart from that of"


def _interval(low: float | None, high: float | None, show: _Writer) -> str:
    if low is None or high is None:
        return ""
    return f" (difference {show(low, sign='+', unit=False)} to {show(high, sign='+')})"


def verdict_sentence(variant: VariantResult, comparison: Comparison) -> str:
    """Return a sentence on one variant's verdict and its evidence."""
    seeds = _seeds(comparison.num_blocks)
    match variant.verdict:
        case "control":
            words = f"the control, {_control_words(variant, comparison)}"
        case "identical":
            words = f"identical to {comparison.control}, and not judged"
        case "diverged":
            words = f"diverged in {variant.num_diverged} of {seeds}, and not judged"
        case "undecided":
            words = f"no verdict, because {comparison.refusal}"
        case _:
            words = _judgement_words(variant, comparison)
    return f"{variant.name}: {words}"


def _control_words(variant: VariantResult, comparison: Comparison) -> str:
    show, seeds = _Writer(comparison), _seeds(comparison.num_blocks)
    if variant.num_diverged or variant.mean is None:
        return f"diverged in {variant.num_diverged} of {seeds}"
    spread = "" if variant.sd is None else f" ± {show(variant.sd, unit=False)}"
    return f"mean {show(variant.mean, unit=False)}{spread}{show.unit} over {seeds}"


def _judgement_words(variant: VariantResult, comparison: Comparison) -> str:
    """Describe a verdict and its evidence; better and worse give a positive size, the others a signed difference."""
    show = _Writer(comparison)
    numbers = (variant.difference, variant.low, variant.high, variant.detectable, comparison.margin)
    difference, low, high, detectable, margin = map(_require_number, numbers)
    one_sided = variant.verdict in ("better", "worse")
    if one_sided and difference < 0:
        difference, low, high = -difference, -high, -low
    sign = "" if one_sided else "+"
    evidence = (
        f"({_percent(comparison.confidence)} interval {show(low, sign=sign, unit=False)} to "
        f"{show(high, sign=sign, unit=False)}; {_seeds(comparison.num_blocks)}; "
        f"{show(detectable, unit=False)} would be seen 4 times in 5)"
    )
    size = show(difference, sign=sign)
    if one_sided:
        return f"{variant.verdict} than {comparison.control} by {size} {evidence}"
    if variant.verdict == "equivalent":
        real = "" if low <= 0 <= high else "; the difference is real but smaller than the margin"
        return (
            f"equivalent to {comparison.control} within ±{show(margin, unit=False)}, difference {size} {evidence}{real}"
        )
    return f"inconclusive against {comparison.control}, difference {size} {evidence}"


def _require_number(number: float | None) -> float:
    assert number is not None
    return number


class _Writer:
    """Write numbers with four decimals, or as many as give the detectable difference two digits."""

    def __init__(self, comparison: Comparison) -> None:
        self.unit = f" {comparison.unit}" if comparison.unit else ""
        scale = comparison.detectable or 1.0
        self.decimals = min(max(4, 1 - math.floor(math.log10(scale))), 15)

    def __call__(self, number: float, *, sign: str = "", unit: bool = True) -> str:
        # z: what rounds to zero has no minus.
        return f"{number:{sign}z.{self.decimals}f}{self.unit if unit else ''}"


def _seeds(number: int) -> str:
    return f"{number} seed" if number == 1 else f"{number} seeds"


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"
