"""Tests of the observed metrics: is a variant's value higher or lower than the baseline's?

Each metric is one number per run, at the end of training, compared with the baseline's under the same seed. All are
tested together, see `tidegate.lab.judging.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, linear_regression, pvariance
from typing import TypeAlias

from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.lab.compare.mechanism import mean_of
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.judging import MetricResult, MetricResults, RunMetric, judge_metrics
from tidegate.lab.training.records import LayerByHead, ObservationSummary, Record
from tidegate.report.page import Column, Table, View, Views, mean_of_known

MetricOf: TypeAlias = Callable[[Record], float | None]
"""A metric of a finished run; None if it has no value."""


def judge_observed(summary: Summary) -> MetricResults | None:
    """Test all metrics on record for the baseline and another variant; return None without any.

    The set of metrics depends on the measurements and not on their results, so the level can be shared.
    """
    metrics = [metric for metric in _metrics(summary) if len(metric.rows) > (metric.control is not None)]
    return judge_metrics(metrics) if metrics else None


def observed_panel(judged: MetricResults, control: str) -> Table | Views:
    """Return a row for each metric and variant, the significant differences in a tab of their own."""
    rows = sorted(judged.results, key=lambda result: _ORDER[result.verdict])
    num_judged = sum(result.verdict != "no verdict" for result in rows)
    num_significant = sum(result.verdict in ("higher", "lower") for result in rows)
    are = "is" if num_significant == 1 else "are"
    table = Table(
        title=f"Of {num_judged} differences in observed metrics, {num_significant} {are} significant"
        if num_judged
        else "No verdicts on the observed metrics",
        columns=(
            Column(title="metric", help=_HELP),
            Column(title="variant"),
            Column(title="verdict", help="Significant if the interval excludes 0. Neither direction is better."),
            Column(title=f"mean of {control}", help="The baseline; empty if the metric is compared with 0."),
            Column(title="mean of the variant"),
            Column(title="difference", signed=True, help="Paired by seed."),
            Column(title="from", signed=True, help="Lower end of the adjusted interval."),
            Column(title="to", signed=True, help="Upper end of the adjusted interval."),
        ),
        rows=tuple(
            (
                result.figure,
                result.variant,
                result.verdict,
                result.control_mean,
                result.mean,
                result.difference,
                result.low,
                result.high,
            )
            for result in rows
        ),
        note=" ".join((_level_in_words(judged), *_reasons(rows))),
    )
    if num_significant in (0, len(rows)):
        return table
    first = replace(table, title="Significant differences", rows=table.rows[:num_significant])
    others = replace(table, title="Other differences", rows=table.rows[num_significant:], note="")
    views = (View(label="significant", panel=first), View(label="others", panel=others))
    return Views(title=table.title, views=views)


_ORDER = {"higher": 0, "lower": 0, "no significant difference": 1, "no verdict": 2}
_HELP = (
    "At the end of training. Weight on the first token, its contribution to a layer's output (relative to that output) "
    "and rank of value to output: means over layers and heads. Rank of the stream: effective rank of the residual "
    "stream after the last block. Loss within and beyond the training length: on rows of four times that length. Loss "
    "spikes: number of training steps. Growth of token dependence over layers: growth from layer to layer of the share "
    "of a gate's variance that lies between tokens rather than heads; compared with 0."
)


def _level_in_words(judged: MetricResults) -> str:
    number, level, own = judged.num_figures, 100 * (1 - judged.confidence), 100 * judged.figure_confidence
    shared = f"{number} metrics share the level of {level:.3g} % equally (Bonferroni): each has {own:.4g} % intervals"
    words = shared if number > 1 else f"The metric has {own:.4g} % intervals"
    return f"{words}, simultaneous for all variants. The family-wise error rate is at most {level:.3g} %."


def _reasons(results: Sequence[MetricResult]) -> Iterator[str]:
    """Return a sentence for each reason that there is no interval."""
    found: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.reason:
            found.setdefault(result.reason, {}).setdefault(result.figure, []).append(result.variant)
    for reason, figures in found.items():
        listed = "; ".join(f"{figure} ({', '.join(variants)})" for figure, variants in figures.items())
        yield f"No interval for {listed}: {reason}."


def _metrics(summary: Summary) -> Iterator[RunMetric]:
    """Yield every metric, with the rows of the variants that have it in some run."""
    control = summary.plan.control
    for name, metric_of in _metrics_of_all(summary):
        known = _known_rows({variant.name: _row(variant, metric_of) for variant in summary.variants})
        yield RunMetric(name=name, rows=known if control in known else {}, control=control)
    slopes: dict[str, list[float | None]] = {}
    for variant in summary.variants:
        gates = _gates_by_site(variant)
        for site in (site for site, gate in gates.items() if not gate.is_input_independent):
            label = variant.name if len(gates) == 1 else f"{variant.name}, {site}"
            slopes[label] = _row(variant, _observed(lambda seen, site=site: _slope_of_token_share(seen.gates[site])))
    yield RunMetric(name="growth of token dependence over layers", rows=_known_rows(slopes), control=None)


def _metrics_of_all(summary: Summary) -> Iterator[tuple[str, MetricOf]]:
    """Yield the metrics of any model."""
    yield "weight on the first token", _observed(lambda seen: mean_of(seen.sink_mass))
    yield "added by the first token", _observed(lambda seen: mean_of(seen.sink_contribution))
    yield "rank of the stream", _observed(lambda seen: seen.effective_rank[-1])
    yield "rank of value to output", _observed(lambda seen: mean_of(seen.map_rank))
    length = summary.plan.task.length or math.inf
    yield "loss within training length", lambda record: _mean_loss(record, 0, length)
    yield "loss beyond training length", lambda record: _mean_loss(record, length, math.inf)
    yield "loss spikes", lambda record: record.num_spikes


def _row(variant: VariantSummary, metric_of: MetricOf) -> list[float | None]:
    return [metric_of(record) if record.status == "finished" else None for record in variant.records]


def _known_rows(rows: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    return {name: row for name, row in rows.items() if any(value is not None for value in row)}


def _observed(metric: Callable[[ObservationSummary], float | None]) -> MetricOf:
    return lambda record: metric(record.observations[-1]) if record.observations else None


def _mean_loss(record: Record, low: float, high: float) -> float | None:
    """Return the mean over the positions above `low` and up to `high`."""
    return mean_of_known(loss for position, loss in record.loss_by_position if low < position <= high)


def _gates_by_site(variant: VariantSummary) -> dict[str, Gate]:
    """Return the gates with values in every observed run; a sink has none."""
    sites = [record.observations[-1].gates.keys() for record in variant.finished if record.observations]
    known = set[str]().union(*sites).intersection(*sites)
    return {gate.site: gate for gate in Gates.parse(variant.gate) if gate.path == gate.site and gate.site in known}


def _slope_of_token_share(gate: Mapping[str, LayerByHead]) -> float | None:
    """Return the slope over layers of the share of tokens in a gate's variance; None with a single layer."""
    shares = [_token_share(*layer) for layer in zip(gate["mean"], gate["spread"], strict=True)]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares) or len(known) < 2:
        return None
    return linear_regression(range(len(known)), known).slope


def _token_share(means: Sequence[float | None], spreads: Sequence[float | None]) -> float | None:
    """Return the variance between tokens, relative to its sum with that between heads; None for a constant gate."""
    known_means, known_spreads = ([value for value in row if value is not None] for row in (means, spreads))
    if not known_means or not known_spreads:
        return None
    tokens, heads = fmean(spread**2 for spread in known_spreads), pvariance(known_means)
    return tokens / (tokens + heads) if tokens + heads > 0 else None
