"""A comparison as a page: what differs, by how much, how surely, and why that may be believed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tidegate.lab.compare.answer import answer
from tidegate.lab.compare.curves import difference_panel, length_panel, loss_views
from tidegate.lab.compare.fairness import fairness_checks, violations_in_words
from tidegate.lab.compare.forecast import seeds_for_a_verdict
from tidegate.lab.compare.layers import layer_sections
from tidegate.lab.compare.mechanism import mechanism_panels
from tidegate.lab.compare.observed_verdicts import judge_observed, observed_panel
from tidegate.lab.compare.robustness import rate_panels, robustness_section
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.judging import MetricResults, rule_text
from tidegate.report.page import (
    CellValue,
    Check,
    Checks,
    Column,
    Estimate,
    Intervals,
    Page,
    Panel,
    Prose,
    Section,
    Snippet,
    Table,
    Verdicts,
)


def comparison_page(summary: Summary) -> Page:
    """Return the page of a comparison."""
    observed = judge_observed(summary)
    return Page(
        title="Gates compared",
        summary=_summary_words(summary),
        sections=tuple(_sections(summary, observed)),
        data=summary.to_dict() | {"observed": None if observed is None else asdict(observed)},
        footer="Made by tidegate from records alone.",
    )


def _sections(summary: Summary, observed: MetricResults | None) -> Iterator[Section]:
    checks = fairness_checks(summary)
    yield Section(title="Verdicts", panels=_verdict_panels(summary, checks))
    yield Section(
        title="All numbers",
        lead="Means over seeds; empty where a run diverged. Costs were measured side by side before the runs began.",
        panels=(main_table(summary), cost_table(summary)),
    )
    yield Section(
        title="Training",
        lead="Each faint line is one run; the bold one is their mean.",
        panels=(loss_views(summary), difference_panel(summary)),
    )
    yield Section(
        title="Was it fair?",
        lead="What was to be equal, read off the records.",
        panels=(Checks(items=checks), *rate_panels(summary)),
    )
    if (section := robustness_section(summary)) is not None:
        yield section
    if panels := mechanism_panels(summary):
        lead = (
            "Measured on the same held-out examples for all runs; maps show the end of the training, means over seeds."
        )
        verdicts = () if observed is None else (observed_panel(observed, summary.plan.control),)
        yield Section(title="What the gates do", lead=lead, panels=(*verdicts, *panels))
    yield from layer_sections(summary)
    if (length := length_panel(summary)) is not None:
        lead = _LONG_EXAMPLES[summary.plan.task.kind]
        yield Section(title="Beyond the training length", lead=lead, panels=(length,))
    yield Section(title="Caution", panels=(_caution(summary),))
    yield Section(title="How to get this again", panels=tuple(_reproduction(summary)))


def _summary_words(summary: Summary) -> str:
    plan, record = summary.plan, summary.control.longest
    seeds = "one seed" if plan.num_seeds == 1 else f"{plan.num_seeds} seeds"
    return (
        f"{answer(summary)} {len(plan.variants)} variants, {seeds} each, equal in {_MATCHED[plan.match]}. "
        f"The control, {plan.control}, has {record.num_parameters:,} parameters and saw "
        f"{record.tokens:,} {summary.examples}. {plan.description}"
    )


_MATCHED = {
    "tokens": "the examples that they see",
    "params": "parameters and examples",
    "flops": "training FLOPs",
    "time": "training time",
    "runs": "what their maker chose",
}

_LONG_EXAMPLES = {
    "lm": "Held-out data in windows four times as long as those of the training.",
    "recall": "Examples with four times as many pairs and queries as those of the training. Nothing is asked before "
    "the last pair, so that every answer is given beyond the training length.",
}
"""What the loss by position was measured on, by the kind of the task."""


def _verdict_panels(summary: Summary, checks: Sequence[Check]) -> tuple[Panel, ...]:
    comparison, control = summary.comparison, summary.plan.control
    items = tuple(
        Estimate(
            label=result.name,
            value=result.difference,
            low=result.low,
            high=result.high,
            verdict=result.verdict,
            sentence=result.sentence,
        )
        for result in comparison.variants
    )
    panels: list[Panel] = [Verdicts(items=items, rule=rule_text(comparison), unit="nats")]
    if effects := tuple(variant.effect_sentence for variant in summary.variants if variant.effect_sentence):
        panels.append(Prose(paragraphs=(_EFFECT_RULE, *effects)))
    if advice := seeds_for_a_verdict(summary):
        panels.append(Prose(paragraphs=(advice,)))
    if cautions := (*comparison.warnings, *violations_in_words(checks)):
        panels.append(Prose(paragraphs=cautions, caution=True))
    if judged := tuple(item for item in items if item.low is not None):
        panels.append(
            Intervals(
                title=f"Left of zero is better than {control}; inside the band a difference does not matter",
                alternative=" ".join(item.sentence for item in judged),
                x_label=f"difference to {control} in held-out loss (nats)",
                items=judged,
                margin=comparison.margin,
            )
        )
    return tuple(panels)


_EFFECT_RULE = (
    "Is it the mechanism? A gate is said to help if its variant is below the control and below its placebo, which has "
    "all of the gate but the mechanism (95 % intervals, paired by seeds). Both must hold, so that neither is adjusted "
    "for the other."
)


def main_table(summary: Summary) -> Table:
    """Return the results of each variant, one row each, the control first."""
    columns = (
        Column(title="variant"),
        Column(title="verdict"),
        Column(title="its gate", help="Whether it helps or harms, against the control and against its placebos."),
        Column(
            title="starts at",
            digits=3,
            help="What the gate multiplies the attention branch by at the start; empty where that is no one number, as "
            "for a sink or a function in the gate's place.",
        ),
        Column(title="held-out loss", unit="nats", digits=4, better="low"),
        Column(title="± sd", unit="nats", digits=4, help="Between seeds, which all variants share."),
        Column(title="difference", unit="nats", digits=4, signed=True, help="To the control, within seeds."),
        Column(title="from", unit="nats", digits=4, signed=True, help="Lower end of the adjusted interval."),
        Column(title="to", unit="nats", digits=4, signed=True, help="Upper end of the adjusted interval."),
        Column(title="adjusted p", digits=4),
    )
    rows = tuple(tuple(_row(variant)) for variant in summary.variants)
    return Table(title="Every variant against the control", columns=columns, rows=rows)


def _row(variant: VariantSummary) -> Iterator[CellValue]:
    result = variant.result
    yield from (variant.name, result.verdict, variant.effect if variant.placebos else None, variant.branch_scale)
    # The mean of those that were left would flatter a variant of which some diverged.
    yield from (None, None) if result.num_diverged else (result.mean, result.sd)
    yield from (result.difference, result.low, result.high, result.p_value)


_METRIC_COLUMNS = {
    "bits_per_byte": (
        Column(title="bits per byte", digits=4, better="low"),
        Column(title="± sd, bits", digits=4),
    ),
    "accuracy": (
        Column(title="accuracy", digits=4, better="high"),
        Column(title="± sd, accuracy", digits=4),
    ),
}
"""By what the task reports besides the loss."""


def cost_table(summary: Summary) -> Table:
    """Return what each variant takes, and what the task reports besides the loss."""
    columns = (
        Column(title="variant"),
        Column(title="parameters", better="low"),
        Column(title="over control", unit="%", digits=2, signed=True, help="Parameters over the control's."),
        Column(title="training FLOPs", unit="10¹²", digits=3, better="low"),
        *_METRIC_COLUMNS.get(summary.metric or "", ()),
        Column(title="diverged", digits=0, better="low"),
        # Times and memory are measured with noise: no best is marked among them.
        Column(title="speed", unit="tokens/s" if summary.examples == "tokens" else "images/s"),
        Column(title="step time", unit="× control", digits=3, help="Median of interleaved steps."),
        Column(title="its middle half", help="Between these ends lie half of the interleaved steps."),
        Column(title="peak memory", unit="MiB", digits=1, help="Of a training step, above rest."),
        Column(title="decode", unit="ms/token", digits=3, help="After a full context, with a cache."),
        Column(title="cache", unit="bytes/token", better="low"),
    )
    rows = tuple(tuple(_cost_row(variant, summary)) for variant in summary.variants)
    return Table(title="Sizes, costs and other figures", columns=columns, rows=rows)


def _cost_row(variant: VariantSummary, summary: Summary) -> Iterator[CellValue]:
    result, cost = variant.result, variant.cost
    own, control = variant.num_parameters, summary.control.num_parameters
    yield from (variant.name, own, 100 * (own / control - 1), variant.longest.flops / 1e12)
    if summary.metric is not None:
        yield from (None if result.num_diverged else variant.metric(summary.metric)) or (None, None)
    yield result.num_diverged
    if cost is None:
        yield from [None] * 6
        return
    yield from (round(cost.tokens_per_second), cost.time_ratio)
    yield f"{cost.time_ratio_low:.3f} to {cost.time_ratio_high:.3f}"
    yield None if cost.peak_bytes is None else cost.peak_bytes / 2**20
    yield from (cost.decode_milliseconds, cost.cache_bytes_per_token)


def _caution(summary: Summary) -> Prose:
    """Say which sizes were run: matching the number of parameters leaves width and depth as they are."""
    models = [record.run.model for variant in summary.variants for record in variant.records]
    sizes = sorted({(model.d_model, model.num_layers) for model in models})
    record = summary.control.longest
    listed = "; ".join(f"{layers} layers of width {width}" for width, layers in sizes)
    words = (
        f"These results hold for this data and these training options, at {record.num_parameters:,} parameters "
        f"({listed}) and {record.tokens:,} {summary.examples}. Differences between gates have shrunk, and changed "
        "sign, from one size to the next: run another `--preset`, and more `--tokens`, before you build on this."
    )
    return Prose(caution=True, paragraphs=(words,))


def _reproduction(summary: Summary) -> Iterator[Panel]:
    plan, run = summary.plan, summary.control.records[0].run.to_dict()
    yield Snippet(title="Command", text=plan.command or "(made from Python)")
    yield _differences(summary)
    yield Snippet(title="Versions and machine", text=_to_json(plan.environment))
    yield Snippet(title="Data", text=_to_json(plan.task.to_dict()))
    options = {name: run[name] for name in ("model", "training")}
    yield Snippet(title=f"Model and training of {plan.control}", text=_to_json(options))


def _differences(summary: Summary) -> Table:
    """What of the configuration differs from the control's."""
    control = _flatten(summary.control.records[0].run.to_dict())
    rows = [
        (variant.name, name, str(control.get(name)), str(value))
        for variant in summary.variants
        for name, value in _flatten(variant.records[0].run.to_dict()).items()
        if name not in ("variant", "block") and value != control.get(name)
    ]
    titles = ("variant", "option", summary.plan.control, "variant's own")
    return Table(
        title="All that differs between the variants' runs",
        columns=tuple(Column(title=title) for title in titles),
        rows=tuple(rows),
    )


def _flatten(run: dict[str, Any]) -> dict[str, Any]:
    nested = {f"{part}.{name}": value for part in ("model", "training") for name, value in run[part].items()}
    return {name: value for name, value in run.items() if not isinstance(value, dict)} | nested


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
