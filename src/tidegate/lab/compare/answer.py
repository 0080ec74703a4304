"""The answer of a comparison in a few sentences: the estimates, and the evidence and limits behind them."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate._text import number_of
from tidegate.lab.compare.fairness import fairness_checks, late_gain
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.judging.words import estimate_words, interval_words


def answer(summary: Summary) -> str:
    """Return the findings on every variant, whether they are due to its mechanism, and the evidence and limits."""
    control, refusal = summary.plan.control, summary.comparison.refusal
    placebos = {placebo.placebo for variant in summary.variants for placebo in variant.placebos}
    others = [variant for variant in summary.variants if variant.name != control]
    # Variants that are only placebos are left out, unless there is nothing else.
    shown = [variant for variant in others if variant.name not in placebos] or others
    findings = _findings(shown, summary)
    violated = [
        check.name[:1].lower() + check.name[1:] for check in fairness_checks(summary) if check.state == "violated"
    ]
    failed = "one fairness check" if len(violated) == 1 else f"{len(violated)} fairness checks"
    caution = f" Caution: {failed} failed ({'; '.join(violated)})." if violated else ""
    return f"{f'No verdict: {refusal}' if refusal else findings}. {_basis(summary)}{caution}"


def _findings(variants: Sequence[VariantSummary], summary: Summary) -> str:
    """Return the findings on variants that differ significantly, are equivalent or were not tested; then the rest."""
    told = [_finding(variant, summary) for variant in variants if variant.result.verdict != "inconclusive"]
    rest = [variant for variant in variants if variant.result.verdict == "inconclusive"]
    parts = [f"Compared with the baseline ({summary.plan.control}): {'; '.join(told)}"] if told else []
    if rest:
        baseline = "the baseline" if told else f"the baseline ({summary.plan.control})"
        names = ", ".join(variant.name for variant in rest)
        intervals = interval_words([variant.result for variant in rest], summary.comparison)
        parts.append(f"No significant difference in loss from {baseline}: {names} ({intervals})")
    return ". ".join(parts)


def _finding(variant: VariantSummary, summary: Summary) -> str:
    verdict, name = variant.result.verdict, variant.name
    if verdict in ("identical", "diverged"):
        return f"{name} is identical" if verdict == "identical" else f"{name} diverged"
    if variant.placebos and variant.effect != "not shown":
        words = f"its mechanism {variant.effect}{', by less than the margin' * (verdict == 'equivalent')}"
    elif verdict in ("better", "worse"):
        words = f"significantly {verdict}{', but not shown to be due to its mechanism' * bool(variant.placebos)}"
    else:
        words = "equivalent" if verdict == "equivalent" else "no significant difference"
    change = "has an estimated effect on the loss of" if words == "equivalent" else "changes the loss by"
    return f"{name} {change} {estimate_words(variant.result, summary.comparison)}, {words}"


def _basis(summary: Summary) -> str:
    plan, record = summary.plan, summary.control.longest
    if plan.is_tuned:
        tuned = "each variant tuned on the same grid"
    elif plan.settings:
        tuned = "previously tuned settings (tuning variance is not included in the intervals)"
    else:
        tuned = "one untuned setting"
    gain = late_gain(summary.control)
    limit = ""
    if gain is not None and gain >= plan.margin:
        limit = (
            f" The baseline's loss still fell by {100 * gain:.1f} % in the last fifth of training, so the result holds "
            "for this training length only and may differ for longer training."
        )
    return (
        f"Based on {number_of(plan.num_seeds, 'seed')} of models with {record.num_parameters:,} parameters (the "
        f"baseline), trained on {record.tokens:,} {summary.examples}, with {tuned}.{limit}"
    )
