"""The answer of a comparison in a sentence or two: what is found, and what that rests on."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.lab.compare.fairness import fairness_checks, late_gain
from tidegate.lab.compare.summary import Summary, VariantSummary


def answer(summary: Summary) -> str:
    """Say which variants differ from the control, whether that is their mechanism, and what it rests on."""
    comparison = summary.comparison
    if comparison.refusal:
        return f"No verdict: {comparison.refusal}."
    found = "; ".join(_finding(variant, summary.plan.control) for variant in _of_interest(summary))
    return f"In short: {found}. {_basis(summary)}{_reservation(summary)}"


def _of_interest(summary: Summary) -> Iterator[VariantSummary]:
    """All but the control and what is only there as a placebo; those if there is nothing else."""
    placebos = {placebo.placebo for variant in summary.variants for placebo in variant.placebos}
    others = [variant for variant in summary.variants if variant.name != summary.plan.control]
    yield from [variant for variant in others if variant.name not in placebos] or others


def _finding(variant: VariantSummary, control: str) -> str:
    if variant.placebos and variant.effect != "not shown":
        small = " by less than the margin" if variant.result.verdict == "equivalent" else ""
        return f"{variant.name} {variant.effect}{small}"
    match variant.result.verdict:
        case "better" | "worse" as verdict:
            doubt = ", which its placebo may be as well" if variant.placebos else ""
            return f"{variant.name} is {verdict} than {control}{doubt}"
        case "equivalent":
            return f"{variant.name} does as well as {control}"
        case "identical":
            return f"{variant.name} is {control} under another name"
        case "diverged":
            return f"{variant.name} diverged"
        case _:
            return f"{variant.name} is not told apart from {control}"


def _basis(summary: Summary) -> str:
    plan, record = summary.plan, summary.control.longest
    if plan.is_tuned:
        tuned = "tuned alike"
    elif plan.settings:
        tuned = "at settings tuned before (the luck of that choice is not in the intervals)"
    else:
        tuned = "at one untuned setting"
    gain = late_gain(summary.control)
    limit = (
        f" The control's loss still fell by {gain:.1%} in the last fifth of its training: this holds at this budget."
        if gain is not None and gain >= plan.margin
        else ""
    )
    size = f"{record.num_parameters:,} parameters and {record.tokens:,} {summary.examples}"
    return f"This rests on {plan.num_seeds} seeds of models with {size}, {tuned}.{limit}"


def _reservation(summary: Summary) -> str:
    violated = [check.name for check in fairness_checks(summary) if check.state == "violated"]
    return f" Read it with care, a check is violated: {'; '.join(violated)}." if violated else ""
