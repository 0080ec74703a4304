"""Statistics of gates and attention: by layer and head at the end of training, and over its course."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from tidegate.lab.compare.curves import seeds_and_mean
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.training.records import LayerByHead, ObservationSummary, Record
from tidegate.report.page import Lines, Panel, View, Views, layer_head_maps, mean_of_known
from tidegate.torch.observing import CLOSED_BELOW, statistic_names

_NAMES = statistic_names("the first key")
_BY_HEAD: tuple[tuple[str, str, Callable[[ObservationSummary], LayerByHead | None]], ...] = (
    ("weight on the first token", "Attention weight on the first token", lambda seen: seen.sink_mass),
    (_NAMES["sink"], "Attention weight on the sink logit in the softmax's denominator", lambda seen: seen.sink_logit),
    (_NAMES["impact"], "Share of the first token in the sum of weighted values", lambda seen: seen.sink_impact),
    (
        "added by the first token",
        "Contribution of the first token to a layer's output, relative to that output",
        lambda seen: seen.sink_contribution,
    ),
    ("entropy (nats)", "Entropy of the attention weights", lambda seen: seen.entropy),
    (
        "rank of value to output",
        "Effective rank of the maps from value to output over the tokens",
        lambda seen: seen.map_rank,
    ),
)
"""Statistics of heads: name, description, and access."""
_GATES = (
    ("mean gate", "Mean gate values", "mean"),
    (f"share below {CLOSED_BELOW}", "Share of closed gates", "below"),
    ("spread over tokens", "Standard deviation of gates between tokens", "spread"),
)
_AT_THE_END = ", at the end of training"


def mechanism_panels(summary: Summary) -> tuple[Panel, ...]:
    """Return maps and curves of gates and attention; none if no run was observed."""
    observed = [variant for variant in summary.variants if any(record.observations for record in variant.finished)]
    views = (
        ("Gates by layer and head", _gate_maps(observed)),
        ("Attention by layer and head", _attention_maps(observed)),
        ("Over the course of training", _courses(summary) if observed else ()),
    )
    found = ((title, tuple(own)) for title, own in views)
    return tuple(Views(title=title, views=own) for title, own in found if own)


def _gate_maps(variants: Sequence[VariantSummary]) -> Iterator[View]:
    sites = {variant.name: sorted({site for seen in _final(variant) for site in seen.gates}) for variant in variants}
    for name, title, figure in _GATES:
        maps = {
            variant.name if len(sites[variant.name]) == 1 else f"{variant.name}, {site}": _mean_over_runs(
                seen.gates[site][figure] for seen in _final(variant) if site in seen.gates
            )
            for variant in variants
            for site in sites[variant.name]
        }
        if maps:
            yield View(label=name, panel=layer_head_maps(title, name, maps, when=_AT_THE_END))


def _attention_maps(variants: Sequence[VariantSummary]) -> Iterator[View]:
    for name, title, figure in _BY_HEAD:
        maps = {variant.name: rows for variant in variants if (rows := _mean_over_runs(map(figure, _final(variant))))}
        if maps:
            yield View(label=name, panel=layer_head_maps(title, name, maps, when=_AT_THE_END))


def _courses(summary: Summary) -> Iterator[View]:
    observations, curve = attrgetter("observations"), attrgetter("curve")
    for name, title, statistic in _BY_HEAD:
        label = f"{title[:1].lower()}{title[1:]}, mean over heads"
        yield from _course(summary, name, label, observations, lambda seen, of=statistic: mean_of(of(seen)))
    label = "largest activation of the residual stream"
    yield from _course(summary, "largest activation", label, observations, lambda seen: max(seen.largest_activation))
    label = "effective rank after the last block"
    yield from _course(summary, "rank of the stream", label, observations, lambda seen: seen.effective_rank[-1])
    label = "norm of the gradient before clipping"
    yield from _course(summary, "gradient norm", label, curve, lambda point: point.gradient_norm)
    label = "norm of the gates' gradient"
    yield from _course(summary, "gates' gradient norm", label, curve, lambda point: point.gate_gradient_norm)


def _course(
    summary: Summary,
    name: str,
    label: str,
    points: Callable[[Record], Sequence[Any]],
    figure: Callable[[Any], float | None],
) -> Iterator[View]:
    """Plot one number of every run over its training; nothing if no run has it, for example without gates."""
    lines = seeds_and_mean(
        summary,
        lambda record: tuple(point.tokens / 1e6 for point in points(record)),
        lambda record: [figure(point) for point in points(record)],
    )
    series = tuple(line for line in lines if any(value is not None for value in line.y))
    if not series:
        return
    last = (f"{line.label} {line.y[-1]:.3g}" for line in series if not line.faint and line.y[-1] is not None)
    ends = ", ".join(last) or "no run finished"
    panel = Lines(
        title=f"{name[:1].upper()}{name[1:]} at the end of training: {ends}",
        alternative=f"{name} against {summary.examples} seen, for each variant; at the end: {ends}.",
        x_label=f"{summary.examples} seen (millions)",
        y_label=label,
        series=series,
    )
    yield View(label=name, panel=panel)


def _final(variant: VariantSummary) -> list[ObservationSummary]:
    return [record.observations[-1] for record in variant.finished if record.observations]


def _mean_over_runs(runs: Iterable[LayerByHead | None]) -> LayerByHead:
    """Return the mean over runs for each head of each layer, without runs that are None; empty if all are."""
    layers = zip(*(run for run in runs if run is not None), strict=True)
    return tuple(tuple(mean_of_known(head) for head in zip(*layer, strict=True)) for layer in layers)


def mean_of(rows: LayerByHead | None) -> float | None:
    """Return the mean over layers and heads, without missing numbers; None if all are missing."""
    return mean_of_known(value for row in rows or () for value in row)
