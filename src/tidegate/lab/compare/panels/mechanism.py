"""What gates and attention did: by layer and head at the end, and in the course of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

from tidegate.lab.compare.panels.curves import seeds_and_mean
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.training.records import LayerByHead, ObservationSummary, Point, Record
from tidegate.report.page import Column, Lines, Panel, Table, View, Views, layer_head_maps, mean_of_known
from tidegate.torch.observing import CLOSED_BELOW, statistic_names

MAP_RANK = "rank of value to output"
"""What the page calls the effective rank of the map from value to output."""
_NAMES = statistic_names("the first key")
_AT_THE_END = ", at the end of the training"
_Point = TypeVar("_Point", ObservationSummary, Point)


def mechanism_panels(summary: Summary) -> tuple[Panel, ...]:
    """Return maps and curves of gates and attention; none for a comparison of which no run was observed."""
    observed = [variant for variant in summary.variants if any(record.observations for record in variant.finished)]
    if not observed:
        return ()
    gates = _gate_maps(observed)
    panels: list[Panel] = []
    if gates:
        panels += [Views(title="Gates by layer and head", views=tuple(gates)), _specialisation(observed)]
    panels.append(_weight_table(observed))
    panels.append(Views(title="Attention by layer and head", views=tuple(_attention_maps(observed))))
    drawn = tuple(view for view in _courses(summary) if view is not None)
    panels.append(Views(title="In the course of the training", views=drawn))
    return tuple(panels)


def _gate_maps(variants: Sequence[VariantSummary]) -> list[View]:
    figures = (
        ("mean gate", "How open the gates stand, on average", "mean"),
        (f"share below {CLOSED_BELOW}", "How often gates are shut", "below"),
        ("spread over tokens", "How much gates depend on the token", "spread"),
    )
    views: list[View] = []
    for name, title, figure in figures:
        maps = {
            _site_label(variant, site, sites): _gate_means(variant, site, figure)
            for variant in variants
            for sites in [_sites(variant)]
            for site in sites
        }
        if maps:
            panel = layer_head_maps(f"{title}: {_range(maps.values())}", name, maps, when=_AT_THE_END)
            views.append(View(label=name, panel=panel))
    return views


def _weight_table(variants: Sequence[VariantSummary]) -> Table:
    """Which part of the weight the first token and a sink have, and how much the first token adds."""
    rows: list[tuple[float | str | None, ...]] = []
    for variant in variants:
        final = _final(variant)
        first = _mean_over_runs(seen.sink_mass for seen in final)
        sink = _mean(_mean_over_runs(seen.sink_logit for seen in final))
        known = [value for row in first for value in _drop_none(row)]
        mean = _mean(first)
        others = None if mean is None else 1 - mean - (sink or 0.0)
        added = _mean(_mean_over_runs(seen.sink_contribution for seen in final))
        rows.append((variant.name, mean, max(known, default=None), sink, others, added))
    return Table(
        title="Where the attention goes",
        columns=(
            Column(title="variant"),
            Column(title="first token", digits=3, help="Its share of the weight, mean over layers, heads and queries."),
            Column(title="in the strongest head", digits=3, help="The same in the head with most of it."),
            Column(
                title="sink logit",
                digits=3,
                help="Share of the sink's logit in the softmax's denominator; empty without one.",
            ),
            Column(title="other tokens", digits=3, help="Share of all other keys."),
            Column(
                title="added by the first token",
                digits=3,
                help="Size of what the first token adds, in units of the layer's output, mean over heads.",
            ),
        ),
        rows=tuple(rows),
    )


def _attention_maps(variants: Sequence[VariantSummary]) -> Iterator[View]:
    figures: list[tuple[str, str, Callable[[ObservationSummary], LayerByHead | None]]] = [
        (_NAMES["mass"], "Attention weight on the first token", lambda seen: seen.sink_mass),
        (
            _NAMES["sink"],
            "Attention weight on the sink logit in the softmax's denominator",
            lambda seen: seen.sink_logit,
        ),
        (_NAMES["impact"], "The first token's share in what heads take in", lambda seen: seen.sink_impact),
        (
            _NAMES["contribution"],
            "What the first token adds to the output of a layer, in units of that output",
            lambda seen: seen.sink_contribution,
        ),
        ("entropy (nats)", "How widely heads look", lambda seen: seen.entropy),
        (
            MAP_RANK,
            "How many directions the maps from value to output make use of over the tokens",
            lambda seen: seen.map_rank,
        ),
    ]
    for name, title, figure in figures:
        maps = {variant.name: rows for variant in variants if (rows := _mean_over_runs(map(figure, _final(variant))))}
        means = ", ".join(f"{label} {mean:.3f}" for label, rows in maps.items() if (mean := _mean(rows)) is not None)
        if maps:
            panel = layer_head_maps(f"{title}, means over heads: {means}", name, maps, when=_AT_THE_END)
            yield View(label=name, panel=panel)


def _courses(summary: Summary) -> Iterator[View | None]:
    observed: list[tuple[str, str, Callable[[ObservationSummary], float | None]]] = [
        (_NAMES["mass"], "weight on the first token, mean over heads", lambda seen: _mean(seen.sink_mass)),
        (_NAMES["sink"], "weight on the sink logit, mean over heads", lambda seen: _mean(seen.sink_logit)),
        (_NAMES["impact"], "share of the first token, mean over heads", lambda seen: _mean(seen.sink_impact)),
        (
            _NAMES["contribution"],
            "what the first token adds to a layer's output, mean over heads",
            lambda seen: _mean(seen.sink_contribution),
        ),
        ("entropy", "attention entropy (nats), mean over heads", lambda seen: _mean(seen.entropy)),
        ("largest activation", "largest activation of the residual stream", lambda seen: max(seen.largest_activation)),
        ("effective rank", "effective rank after the last block", lambda seen: seen.effective_rank[-1]),
        (MAP_RANK, "effective rank from value to output, mean over heads", lambda seen: _mean(seen.map_rank)),
    ]
    norms: list[tuple[str, str, Callable[[Point], float | None]]] = [
        ("gradient norm", "norm of the gradient before clipping", lambda point: point.gradient_norm),
        ("gates' gradient norm", "norm of the gates' part of the gradient", lambda point: point.gate_gradient_norm),
    ]
    for name, label, figure in observed:
        yield _course(summary, name, label, lambda record: record.observations, figure)
    for name, label, figure in norms:
        yield _course(summary, name, label, lambda record: record.curve, figure)


def _course(
    summary: Summary,
    name: str,
    label: str,
    points: Callable[[Record], Sequence[_Point]],
    figure: Callable[[_Point], float | None],
) -> View | None:
    """Draw one figure of every run against its training; None if no run has it, as where nothing is gated."""
    lines = seeds_and_mean(
        summary,
        lambda record: tuple(point.tokens / 1e6 for point in points(record)),
        lambda record: [figure(point) for point in points(record)],
    )
    series = tuple(line for line in lines if any(value is not None for value in line.y))
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
            means, spreads = _gate_means(variant, site, "mean"), _gate_means(variant, site, "spread")
            rows += [
                (_site_label(variant, site, sites), float(layer), fmean(mean), pstdev(mean), fmean(spread))
                for layer, (mean, spread) in enumerate(
                    zip(map(_drop_none, means), map(_drop_none, spreads), strict=True)
                )
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


def _final(variant: VariantSummary) -> list[ObservationSummary]:
    return [record.observations[-1] for record in variant.finished if record.observations]


def _sites(variant: VariantSummary) -> list[str]:
    return sorted({site for seen in _final(variant) for site in seen.gates})


def _site_label(variant: VariantSummary, site: str, sites: Sequence[str]) -> str:
    return variant.name if len(sites) == 1 else f"{variant.name}, {site}"


def _gate_means(variant: VariantSummary, site: str, figure: str) -> LayerByHead:
    return _mean_over_runs(seen.gates[site][figure] for seen in _final(variant))


def _mean_over_runs(runs: Iterable[LayerByHead | None]) -> LayerByHead:
    """The mean over the runs that have it, for each head of each layer; nothing if none has."""
    layers = zip(*(run for run in runs if run is not None), strict=True)
    return tuple(tuple(mean_of_known(head) for head in zip(*layer, strict=True)) for layer in layers)


def _mean(rows: LayerByHead | None) -> float | None:
    return mean_of_known(value for row in rows or () for value in row)


def _drop_none(row: Iterable[float | None]) -> list[float]:
    return [value for value in row if value is not None]


def _range(maps: Iterable[LayerByHead]) -> str:
    numbers = [value for rows in maps for row in rows for value in _drop_none(row)]
    return f"from {min(numbers):.3f} to {max(numbers):.3f}"
