"""The words for what a comparison says: a sentence for each variant, and the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tidegate._verdict import Effect
from tidegate.lab.judging.judge import Comparison, VariantResult
from tidegate.lab.judging.placebos import PlaceboResult

RULE = (
    "Each variant is compared with {control} on the same {seeds}. A difference between two means is judged against "
    "the residual of the variant × seed table, which is what the variant and the seed leave unexplained. The "
    "{confidence} intervals hold for all variants at once (Dunnett's adjustment). Equivalent: the interval lies "
    "within ±{margin}, the margin. Better or worse: it does not, and excludes zero. Inconclusive: neither. If the "
    "residuals of one spread wider than the others', each variant is judged by its own differences to {control} "
    "instead (paired t, Bonferroni's adjustment). That is decided by F tests: the control is tested at 10 %, and "
    "the other variants share another 10 % equally. A variant with a diverged run is called diverged, one that is the "
    "control under another name identical; neither enters the table. With fewer than three seeds, or a control that "
    "diverged, no verdict is given. The judgement is made once, after the last run."
)
"""The rule by which variants are judged; `rule_text` fills in its numbers."""


def rule_text(comparison: Comparison) -> str:
    """The rule with the numbers of one comparison, for people who read its page."""
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
    judged = "All are judged by it" if comparison.pooled else "Spreads are unequal, and each is judged by its own runs"
    return (
        f"{text} Here the residual has a standard deviation of {show(comparison.residual_sd)}. {judged}, with "
        f"{comparison.degrees_of_freedom} degrees of freedom and the critical value {comparison.critical_value:.3f}; a "
        f"true difference of {show(comparison.detectable)} would be detected with 80 % power (noncentral t)."
    )


def add_sentences(comparison: Comparison) -> Comparison:
    """Return the comparison with a sentence for each variant."""
    return replace(
        comparison, variants=tuple(replace(v, sentence=_sentence(v, comparison)) for v in comparison.variants)
    )


def effect_sentence(
    variant: VariantResult, placebos: Sequence[PlaceboResult], effect: Effect, comparison: Comparison
) -> str:
    """Say whether it is the mechanism that makes the difference, and what that rests on; empty without a placebo."""
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


def _sentence(variant: VariantResult, comparison: Comparison) -> str:
    control = comparison.control
    match variant.verdict:
        case "control":
            return f"{variant.name}: the control, {_control_words(variant, comparison)}"
        case "identical":
            return f"{variant.name}: identical to {control}, and not judged"
        case "diverged":
            return (
                f"{variant.name}: diverged in {variant.num_diverged} of {_seeds(comparison.num_blocks)}, and not judged"
            )
        case "undecided":
            return f"{variant.name}: no verdict, because {comparison.refusal}"
        case _:
            return f"{variant.name}: {_judgement_words(variant, comparison)}"


def _control_words(variant: VariantResult, comparison: Comparison) -> str:
    show = _Writer(comparison)
    if variant.num_diverged:
        return f"diverged in {variant.num_diverged} of {_seeds(comparison.num_blocks)}"
    spread = "" if variant.sd is None else f" ± {show(variant.sd, unit=False)}"
    mean = show(_require_number(variant.mean), unit=False)
    return f"mean {mean}{spread}{_unit(comparison)} over {_seeds(comparison.num_blocks)}"


def _judgement_words(variant: VariantResult, comparison: Comparison) -> str:
    """Describe a verdict and its evidence; better and worse give a positive size, the others a signed difference."""
    show = _Writer(comparison)
    difference = _require_number(variant.difference)
    low, high = _require_number(variant.low), _require_number(variant.high)
    one_sided = variant.verdict in ("better", "worse")
    if one_sided and difference < 0:
        difference, low, high = -difference, -high, -low
    sign = "" if one_sided else "+"
    ends = f"{show(low, sign=sign, unit=False)} to {show(high, sign=sign, unit=False)}"
    evidence = (
        f"({_percent(comparison.confidence)} interval {ends}; {_seeds(comparison.num_blocks)}; "
        f"{show(_require_number(variant.detectable), unit=False)} would be seen 4 times in 5)"
    )
    size = show(difference, sign=sign)
    margin = show(_require_number(comparison.margin), unit=False)
    if one_sided:
        return f"{variant.verdict} than {comparison.control} by {size} {evidence}"
    if variant.verdict == "equivalent":
        real = "" if low <= 0 <= high else "; the difference is real but smaller than the margin"
        return f"equivalent to {comparison.control} within ±{margin}, difference {size} {evidence}{real}"
    return f"inconclusive against {comparison.control}, difference {size} {evidence}"


def _require_number(number: float | None) -> float:
    assert number is not None
    return number


class _Writer:
    """Write numbers with four decimals, or as many as give the detectable difference two digits."""

    def __init__(self, comparison: Comparison) -> None:
        self.unit = _unit(comparison)
        scale = comparison.detectable or 1.0
        self.decimals = min(max(4, 1 - math.floor(math.log10(scale))), 15)

    def __call__(self, number: float, *, sign: str = "", unit: bool = True) -> str:
        # z: what rounds to zero has no minus.
        return f"{number:{sign}z.{self.decimals}f}{self.unit if unit else ''}"


def _unit(comparison: Comparison) -> str:
    return f" {comparison.unit}" if comparison.unit else ""


def _seeds(number: int) -> str:
    return f"{number} seed" if number == 1 else f"{number} seeds"


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"
