"""What gates and attention did: by layer and head at the end, and in the course of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

from tidegate.lab.compare.curve_panels import seeds_and_mean
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.training.records import GateObservation, LayerByHead, Observation, Record
from tidegate.report.page import Column, Lines, Map, Maps, Panel, Table, View, Views

Seen = TypeVar("Seen", Observation, GateObservation)


def mechanism_panels(summary: Summary) -> tuple[Panel, ...]:
    """All of them; none for a comparison of which no run was observed."""
    observed = [variant for variant in summary.variants if any(record.observations for record in variant.finished)]
    if not observed:
        return ()
    gates = _gate_maps(observed)
    panels: list[Panel] = []
    if gates:
        panels += [Views(title="Gates by layer and head", views=tuple(gates)), _specialisation(observed)]
    panels.append(Views(title="Attention by layer and head", views=tuple(_attention_maps(observed))))
    drawn = tuple(view for view in _courses(summary) if view is not None)
    panels.append(Views(title="In the course of the training", views=drawn))
    return tuple(panels)


def _gate_maps(variants: Sequence[VariantSummary]) -> list[View]:
    figures: list[tuple[str, str, Callable[[GateObservation], LayerByHead]]] = [
        ("mean gate", "How open the gates stand, on average", lambda gate: gate.mean),
        ("share below 0.1", "How often gates are shut", lambda gate: gate.below),
        ("spread over tokens", "How much gates depend on the token", lambda gate: gate.spread),
    ]
    views: list[View] = []
    for name, title, figure in figures:
        maps = [
            Map(label=_site_label(variant, site, sites), values=_mean_of(_final_gates(variant, site), figure))
            for variant in variants
            for sites in [_sites(variant)]
            for site in sites
        ]
        if maps:
            views.append(View(label=name, panel=_maps(f"{title}: {_range(maps)}", name, maps)))
    return views


def _attention_maps(variants: Sequence[VariantSummary]) -> Iterator[View]:
    figures: list[tuple[str, str, Callable[[Observation], LayerByHead]]] = [
        ("sink mass", "Attention weight on the first token", lambda seen: seen.sink_mass),
        ("sink impact", "The first token's share in what heads take in", lambda seen: seen.sink_impact),
        ("entropy (nats)", "How widely heads look", lambda seen: seen.entropy),
    ]
    for name, title, figure in figures:
        maps = [Map(label=variant.name, values=_mean_of(_final(variant), figure)) for variant in variants]
        means = ", ".join(f"{each.label} {_mean(each.values):.3f}" for each in maps)
        yield View(label=name, panel=_maps(f"{title}, means over heads: {means}", name, maps))


def _courses(summary: Summary) -> Iterator[View | None]:
    figures: list[tuple[str, str, Callable[[Observation], float]]] = [
        ("sink mass", "weight on the first token, mean over heads", lambda seen: _mean(seen.sink_mass)),
        ("sink impact", "share of the first token, mean over heads", lambda seen: _mean(seen.sink_impact)),
        ("entropy", "attention entropy (nats), mean over heads", lambda seen: _mean(seen.entropy)),
        ("largest activation", "largest activation of the residual stream", lambda seen: max(seen.largest_activation)),
        ("effective rank", "effective rank after the last block", lambda seen: seen.effective_rank[-1]),
    ]
    for name, label, figure in figures:
        yield _course(
            summary,
            name,
            label,
            lambda record: [seen.tokens / 1e6 for seen in record.observations],
            lambda record, figure=figure: [figure(seen) for seen in record.observations],
        )
    for name, label, figure in _NORMS:
        yield _course(
            summary,
            name,
            label,
            lambda record: [point.tokens / 1e6 for point in record.curve],
            lambda record, figure=figure: [figure(point) for point in record.curve],
        )


_NORMS = (
    ("gradient norm", "norm of the gradient before clipping", lambda point: point.gradient_norm),
    ("gates' gradient norm", "norm of the gates' part of the gradient", lambda point: point.gate_gradient_norm),
)


def _course(
    summary: Summary,
    name: str,
    label: str,
    x: Callable[[Record], list[float]],
    y: Callable[[Record], list[float | None]],
) -> View | None:
    """One figure of every run; None if no run has it, as where nothing is gated."""
    series = tuple(
        line
        for line in seeds_and_mean(summary, lambda record: tuple(x(record)), y)
        if any(value is not None for value in line.y)
    )
    if not series:
        return None
    last = (f"{line.label} {line.y[-1]:.3g}" for line in series if not line.faint and line.y[-1] is not None)
    ends = ", ".join(last) or "no run came there"
    return View(
        label=name,
        panel=Lines(
            title=f"{name[:1].upper()}{name[1:]} at the end of the training: {ends}",
            alternative=f"{name} against {summary.examples} seen, for each variant; at the end: {ends}.",
            x_label=f"{summary.examples} seen (millions)",
            y_label=label,
            series=series,
        ),
    )


def _specialisation(variants: Sequence[VariantSummary]) -> Table:
    """How far the gates of a layer's heads differ, and how far they follow the token."""
    rows: list[tuple[float | str | None, ...]] = []
    for variant in variants:
        sites = _sites(variant)
        for site in sites:
            means = _mean_of(_final_gates(variant, site), lambda gate: gate.mean)
            spreads = _mean_of(_final_gates(variant, site), lambda gate: gate.spread)
            rows += [
                (_site_label(variant, site, sites), float(layer), fmean(mean), pstdev(mean), fmean(spread))
                for layer, (mean, spread) in enumerate(zip(means, spreads, strict=True))
            ]
    return Table(
        title="Do heads specialise, and do deeper layers gate by the token?",
        columns=(
            Column(title="gate"),
            Column(title="layer", digits=0),
            Column(title="mean gate", digits=3),
            Column(title="spread between heads", digits=4, help="Standard deviation of the heads' mean gates."),
            Column(title="spread over tokens", digits=4, help="Standard deviation over tokens, mean over channels."),
        ),
        rows=tuple(rows),
    )


def _maps(title: str, name: str, maps: Sequence[Map]) -> Maps:
    words = "; ".join(
        f"{each.label}: " + ", ".join(f"layer {row} {fmean(values):.3f}" for row, values in enumerate(_full(each)))
        for each in maps
    )
    return Maps(
        title=title,
        alternative=f"{name} by layer and head, at the end of the training. Means of layers: {words}.",
        row_label="layer",
        column_label="head",
        value_label=name,
        maps=tuple(maps),
    )


def _final(variant: VariantSummary) -> list[Observation]:
    return [record.observations[-1] for record in variant.finished if record.observations]


def _final_gates(variant: VariantSummary, site: str) -> list[GateObservation]:
    return [seen.gates[site] for seen in _final(variant)]


def _sites(variant: VariantSummary) -> list[str]:
    return sorted({site for seen in _final(variant) for site in seen.gates})


def _site_label(variant: VariantSummary, site: str, sites: Sequence[str]) -> str:
    return variant.name if len(sites) == 1 else f"{variant.name}, {site}"


def _mean_of(seen: Sequence[Seen], figure: Callable[[Seen], LayerByHead]) -> LayerByHead:
    """The mean over runs, for each head of each layer."""
    layers = zip(*(figure(one) for one in seen), strict=True)
    return tuple(tuple(fmean(head) for head in zip(*layer, strict=True)) for layer in layers)


def _mean(values: Sequence[Sequence[float | None]]) -> float:
    return fmean(value for row in values for value in row if value is not None)


def _full(each: Map) -> list[list[float]]:
    return [[value for value in row if value is not None] for row in each.values]


def _range(maps: Sequence[Map]) -> str:
    numbers = [value for each in maps for row in _full(each) for value in row]
    return f"from {min(numbers):.3f} to {max(numbers):.3f}"
