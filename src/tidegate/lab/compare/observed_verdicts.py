"""Verdicts on what the runs observed: is it higher than the control's, lower, or not told apart?

Each figure is one number of each run, at the end of its training, and is compared with the control's under the same
seed. They are judged together, see `tidegate.lab.judging.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, linear_regression, pvariance
from typing import TypeAlias

from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.lab.compare.mechanism import mean_of
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.judging import MetricResult, MetricResults, RunMetric, judge_metrics
from tidegate.lab.training.records import LayerByHead, ObservationSummary, Record
from tidegate.report.page import Column, Table, mean_of_known

FigureOf: TypeAlias = Callable[[Record], float | None]
"""One number of a finished run; None where it has none."""


def judge_observed(summary: Summary) -> MetricResults | None:
    """Judge all figures that are on record for the control and another variant; None if there are none.

    Which figures there are depends on what was measured, and not on how it came out, so that the level can be shared.
    """
    figures = [figure for figure in _figures(summary) if len(figure.rows) > (figure.control is not None)]
    return judge_metrics(figures) if figures else None


def observed_panel(judged: MetricResults, control: str) -> Table:
    """Return a row for each figure and variant, those that are told apart first."""
    rows = sorted(judged.results, key=lambda result: _ORDER[result.verdict])
    num_judged = sum(result.verdict != "no verdict" for result in rows)
    num_told = sum(result.verdict in ("higher", "lower") for result in rows)
    are = "is" if num_told == 1 else "are"
    return Table(
        title=f"Of {num_judged} observed differences, {num_told} {are} told apart"
        if num_judged
        else "What was observed gets no verdict",
        columns=(
            Column(title="figure", help=_HELP),
            Column(title="variant"),
            Column(
                title="verdict", help="Told apart where the interval excludes 0. Neither direction is the good one."
            ),
            Column(title=f"mean of {control}", help="The control; empty where a figure is compared with 0."),
            Column(title="of the variant"),
            Column(title="difference", signed=True, help="Within seeds."),
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


_ORDER = {"higher": 0, "lower": 0, "not told apart": 1, "no verdict": 2}
_HELP = (
    "At the end of the training. Weight on the first token, what it adds to a layer's output (in units of that output) "
    "and the rank of value to output: means over layers and heads. Rank of the stream: effective rank after the last "
    "block. Loss within and beyond the training length: on rows of four times that length. Loss spikes: steps of the "
    "training. Slope of tokens' share: how much more of a gate's variance lies between tokens, and not "
    "between heads, from one layer to the next; compared with 0."
)


def _level_in_words(judged: MetricResults) -> str:
    number, level, own = judged.num_figures, 100 * (1 - judged.confidence), 100 * judged.figure_confidence
    shared = f"{number} figures share the level of {level:.3g} % equally: each is judged at {own:.4g} %"
    words = shared if number > 1 else f"One figure is judged at {own:.4g} %"
    chance = f"Without any true difference, {level:.3g} % of such tables at most would show one"
    return f"{words} for all variants at once. {chance}."


def _reasons(results: Sequence[MetricResult]) -> Iterator[str]:
    """Say why there is no interval, a sentence for each reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.reason:
            found.setdefault(result.reason, {}).setdefault(result.figure, []).append(result.variant)
    for reason, figures in found.items():
        listed = "; ".join(f"{figure} ({', '.join(variants)})" for figure, variants in figures.items())
        yield f"No interval for {listed}: {reason}."


def _figures(summary: Summary) -> Iterator[RunMetric]:
    """Every figure, with the rows of the variants of which some run has it."""
    control = summary.plan.control
    for name, figure_of in _figures_of_all(summary):
        rows = {variant.name: _row(variant, figure_of) for variant in summary.variants}
        known = {variant: row for variant, row in rows.items() if _is_known(row)}
        yield RunMetric(name=name, rows=known if control in known else {}, control=control)
    slopes = {
        label: _row(variant, _observed(lambda seen, site=site: _slope_of_token_share(seen.gates[site])))
        for variant in summary.variants
        for label, site in _reading_sites(variant)
    }
    yield RunMetric(
        name="slope of tokens' share",
        rows={label: row for label, row in slopes.items() if _is_known(row)},
        control=None,
    )


def _figures_of_all(summary: Summary) -> Iterator[tuple[str, FigureOf]]:
    """Figures that any model has."""
    yield "weight on the first token", _observed(lambda seen: mean_of(seen.sink_mass))
    yield "added by the first token", _observed(lambda seen: mean_of(seen.sink_contribution))
    yield "rank of the stream", _observed(lambda seen: seen.effective_rank[-1])
    yield "rank of value to output", _observed(lambda seen: mean_of(seen.map_rank))
    length = summary.plan.task.length or math.inf
    yield "loss within training length", lambda record: _mean_loss(record, 0, length)
    yield "loss beyond training length", lambda record: _mean_loss(record, length, math.inf)
    yield "loss spikes", lambda record: record.num_spikes


def _row(variant: VariantSummary, figure_of: FigureOf) -> list[float | None]:
    return [figure_of(record) if record.status == "finished" else None for record in variant.records]


def _is_known(row: Sequence[float | None]) -> bool:
    return any(value is not None for value in row)


def _observed(figure: Callable[[ObservationSummary], float | None]) -> FigureOf:
    return lambda record: figure(record.observations[-1]) if record.observations else None


def _mean_loss(record: Record, low: float, high: float) -> float | None:
    """The mean over the stretches of positions whose middle lies above `low` and up to `high`."""
    return mean_of_known(loss for position, loss in record.loss_by_position if low < position <= high)


def _gates_by_site(variant: VariantSummary) -> dict[str, Gate]:
    """The gates whose values were seen in every run that was observed; a sink has none."""
    gates = Gates.parse(variant.gate)
    sites = [set(record.observations[-1].gates) for record in variant.finished if record.observations]
    return {
        gate.site: gate for gate in gates if gate.path == gate.site and sites and all(gate.site in own for own in sites)
    }


def _reading_sites(variant: VariantSummary) -> list[tuple[str, str]]:
    """The sites of gates that may differ from token to token, with a label for each."""
    gates = _gates_by_site(variant)
    sites = [site for site, gate in gates.items() if not gate.is_input_independent]
    return [(variant.name if len(gates) == 1 else f"{variant.name}, {site}", site) for site in sites]


def _slope_of_token_share(gate: Mapping[str, LayerByHead]) -> float | None:
    """Slope over layers of the share that tokens have in the variance of a gate; None with a single layer."""
    shares = [_token_share(*layer) for layer in zip(gate["mean"], gate["spread"], strict=True)]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares) or len(known) < 2:
        return None
    return linear_regression(range(len(known)), known).slope


def _token_share(means: Sequence[float | None], spreads: Sequence[float | None]) -> float | None:
    """Variance over tokens, over that and the variance between heads; None for a gate that never differs."""
    own_means, own_spreads = _known(means), _known(spreads)
    if not own_means or not own_spreads:
        return None
    tokens, heads = fmean(spread**2 for spread in own_spreads), pvariance(own_means)
    return tokens / (tokens + heads) if tokens + heads > 0 else None


def _known(row: Sequence[float | None]) -> list[float]:
    return [value for value in row if value is not None]
