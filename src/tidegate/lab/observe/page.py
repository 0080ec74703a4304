"""An observation as a page: maps by layer and head, curves, and tables of all numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from tidegate._json import finite
from tidegate._validation import InputError
from tidegate.report.page import (
    Column,
    Lines,
    Numbers,
    Page,
    Panel,
    Prose,
    Section,
    Series,
    Snippet,
    Table,
    View,
    Views,
    format_number,
    layer_head_maps,
    mean_of_known,
)
from tidegate.torch.observing import (
    CLOSED_BELOW,
    HISTOGRAM_EDGES,
    GateSummary,
    LayerObservation,
    Observation,
    statistic_names,
)

_GateFigure: TypeAlias = Callable[[GateSummary], Sequence[float] | None]

_GATE_FIGURES: tuple[tuple[str, str, _GateFigure], ...] = (
    ("mean gate", "How open the gates stand", lambda gate: gate.mean),
    (f"share below {CLOSED_BELOW}", "How often gates are shut", lambda gate: gate.below),
    ("saturated share", "How often gates are near an end of their range", lambda gate: gate.saturated),
    ("spread over tokens", "How much gates depend on the token", lambda gate: gate.token_spread),
)

_POINTS = 128
"""Points of a curve over positions."""
_CURVES = 7
"""Layers with a curve of their own, as many as there are colors."""
_DISTRIBUTIONS = ("mass", "impact", "entropy", "effective_keys")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statistic:
    """One statistic of a head."""

    key: str
    """Its name in an observation."""
    title: str
    """`{keys}` stands for the key set."""
    digits: int = 3
    from_zero: bool = True
    """Whether its color scale begins at 0."""
    name: str = ""
    """In words, with its unit, for the key set of the observation."""


_STATISTICS = (
    _Statistic(key="mass", title="Attention weight on {keys}"),
    _Statistic(key="sink", title="Attention weight on the sink logit in the softmax's denominator"),
    _Statistic(key="impact", title="Share of {keys} in what heads take in"),
    _Statistic(key="contribution", title="What {keys} adds to the output of a layer, in units of that output"),
    _Statistic(key="entropy", title="How widely heads look"),
    _Statistic(key="effective_keys", title="How many keys heads look at", digits=1),
    _Statistic(key="mean_score", title="The mean score under the weights", from_zero=False),
    _Statistic(key="max_score", title="The largest score of a query", from_zero=False),
    _Statistic(key="heat_capacity", title="The variance of scores under the weights"),
)


def observation_page(observation: Observation, *, model: str, command: str, num_sequences: int, length: int) -> Page:
    """Return the page of one model, observed on sequences of some length.

    Its data hold the observation, with at most 128 points per curve.

    Raises:
        InputError: The observation has no layers.
    """
    if not observation.layers:
        raise InputError(
            "model",
            expected="one with attention calls that can be observed",
            got=model,
            hint="It must use scaled_dot_product_attention, an eager function of transformers, or a softmax between "
            "two products.",
        )
    shown = observation.downsample(_POINTS)
    num_heads = sum(layer.num_heads for layer in observation.layers)
    sequences = "one sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    return Page(
        title=f"Attention of {model}",
        summary=f"Attention layers: {len(observation.layers)}, with {num_heads} heads in all, watched on {sequences} "
        f"of {length} tokens. The key set is {observation.keys}.",
        sections=(
            *observation_sections(shown),
            Section(title="To do it again", panels=(Snippet(title="Command", text=command),)),
        ),
        data={
            "model": model,
            "num_sequences": num_sequences,
            "length": length,
            "observation": json.loads(shown.to_json()),
        },
    )


def observation_sections(observation: Observation) -> tuple[Section, ...]:
    """Return maps and curves, how to read them, and tables of all numbers."""
    parts: list[tuple[str, str, Iterator[View]]] = [
        ("Attention", "By layer and head", _attention_maps(observation)),
        ("Attention", "By position of the query", _position_curves(observation)),
        ("Attention", "Distribution over queries", _distributions(observation)),
        ("Gates", "By layer and head", _gate_maps(observation)),
        ("Residual stream", "By layer", _residual_curves(observation)),
    ]
    panels: dict[str, list[Panel]] = {}
    for section, title, views in parts:
        if shown := tuple(views):
            panels.setdefault(section, []).append(Views(title=title, views=shown))
    panels["How to read it"] = [Prose(paragraphs=tuple(_explanations(observation)))]
    panels["All numbers"] = [_head_table(observation), _layer_table(observation)]
    return tuple(Section(title=title, panels=tuple(inside)) for title, inside in panels.items())


def _attention_maps(observation: Observation) -> Iterator[View]:
    for each in _shown_statistics(observation):
        rows = [_head_means(layer, each.key) for layer in observation.layers]
        title = f"{each.title.format(keys=observation.keys)}: {_extremes(rows, each.digits)}"
        panel = layer_head_maps(title, each.name, {"every head": rows}, from_zero=each.from_zero)
        yield View(label=each.name, panel=panel)


def _gate_maps(observation: Observation) -> Iterator[View]:
    for name, title, figure in _GATE_FIGURES:
        every = {site: [_of_gate(layer, site, figure) for layer in observation.layers] for site in _sites(observation)}
        maps = {site: rows for site, rows in every.items() if any(rows)}
        if maps:
            words = "; ".join(f"{site} {_extremes(rows, 3)}" for site, rows in maps.items())
            yield View(label=name, panel=layer_head_maps(f"{title}: {words}", name, maps))


def _of_gate(layer: LayerObservation, site: str, figure: _GateFigure) -> Numbers:
    """Return one number per head of the site; none where the layer has no such gate, or the gate no such number."""
    values = figure(layer.gates[site]) if site in layer.gates else None
    return tuple(map(finite, values or ()))


def _sites(observation: Observation) -> list[str]:
    return list(dict.fromkeys(site for layer in observation.layers for site in layer.gates))


def _head_table(observation: Observation) -> Table:
    statistics, sites = _shown_statistics(observation), _sites(observation)
    columns = (
        Column(title="layer"),
        Column(title="head"),
        *(Column(title=each.name, digits=each.digits) for each in statistics),
        *(
            Column(title=f"{name}, spread", digits=3, help="Standard deviation over queries.")
            for name in (statistic_names(observation.keys)["mass"], "entropy")
        ),
        *(Column(title=f"{site}: {name}", digits=3) for site in sites for name, _, _ in _GATE_FIGURES[:2]),
    )
    rows = tuple(
        (
            float(place),
            float(head),
            *(_head_means(layer, each.key)[head] for each in statistics),
            *(finite(layer.heads[key][head].std) for key in ("mass", "entropy")),
            *(_gate_of_head(layer, site, figure, head) for site in sites for _, _, figure in _GATE_FIGURES[:2]),
        )
        for place, layer in enumerate(observation.layers)
        for head in range(layer.num_heads)
    )
    return Table(title="Heads: means over queries", columns=columns, rows=rows)


def _gate_of_head(layer: LayerObservation, site: str, figure: _GateFigure, head: int) -> float | None:
    """Return the number of the gate of a query head, which at a site with fewer heads is that of its group."""
    values = _of_gate(layer, site, figure)
    return values[head * len(values) // layer.num_heads] if values else None


def _layer_table(observation: Observation) -> Table:
    sites = _sites(observation)
    columns = (
        Column(title="layer"),
        Column(title="module"),
        Column(title="heads"),
        Column(title="largest activation", digits=2),
        Column(title="effective rank", digits=1),
        *(Column(title=f"{site}: spread between heads", digits=4, help="Of the heads' mean gates.") for site in sites),
    )
    rows = tuple(
        (
            float(place),
            layer.name,
            float(layer.num_heads),
            finite(layer.residual.largest) if layer.residual else None,
            finite(layer.residual.effective_rank) if layer.residual else None,
            *(finite(layer.gates[site].head_spread) if site in layer.gates else None for site in sites),
        )
        for place, layer in enumerate(observation.layers)
    )
    return Table(title="Layers", columns=columns, rows=rows)


def _extremes(rows: Sequence[Numbers], digits: int) -> str:
    """Return the mean over heads, and the head with the largest value, in words."""
    cells = [
        (value, place, head) for place, row in enumerate(rows) for head, value in enumerate(row) if value is not None
    ]
    if not cells:
        return "no number"
    most, place, head = max(cells)
    average = sum(value for value, _, _ in cells) / len(cells)
    return f"{average:.{digits}f} on average, most {most:.{digits}f} (layer {place}, head {head})"


def _explanations(observation: Observation) -> Iterator[str]:
    """Yield explanations of the numbers on the page."""
    names, keys = statistic_names(observation.keys), observation.keys
    mass, impact, contribution = (names[name].capitalize() for name in ("mass", "impact", "contribution"))
    yield (
        f"{mass} is the share of a query's attention weight that falls on {keys}. {impact} weighs each key by the "
        f"length of its value: the share of {keys} in what the head takes in. Large mass with small impact is a head "
        "that parks its attention where it does nothing."
    )
    if any("contribution" in layer.heads for layer in observation.layers):
        yield (
            f"{impact} is a share, and an output gate takes as much from {keys} as from all else. {contribution} is a "
            f"size: the length of what a head hands on from {keys}, after its output gate, over the root mean square "
            "length, over queries, of what all heads of the layer hand on together."
        )
    if any("sink" in layer.heads for layer in observation.layers):
        yield (
            f"{names['sink'].capitalize()} is the share of a sink: an extra logit in the softmax's denominator, which "
            f"no key has. It, {names['mass']} and the share of the other keys make up 1, and entropy counts the logit "
            "as one more key."
        )
    yield (
        "Entropy says how evenly a query spreads its weight, in nats; its exponential is the effective number of keys: "
        "n for equal weights on n keys. All of it is computed query by query, and then averaged over queries and "
        "sequences. A query that may see a single key, as the first of a causal model sees itself alone, has all its "
        "weight on keys there, whatever the model does: it is left out of means and distributions, and kept in curves "
        "by position."
    )
    if any("heat_capacity" in layer.heads for layer in observation.layers):
        yield (
            "The heat capacity is the variance of a query's scores under its own weights: how fast its mean score "
            "answers to the temperature."
        )
    if _sites(observation):
        yield (
            f"A gate multiplies a tensor: 1 lets it through, below {CLOSED_BELOW} next to nothing passes. Spread over "
            "tokens is a standard deviation: a gate that has none is a constant."
        )
    if any(layer.residual for layer in observation.layers):
        yield (
            "The residual stream is what a block hands on. Its effective rank is the exponential of the entropy of its "
            "singular values, scaled to sum 1: how many directions it makes use of."
        )
    yield "This is one model on one text; another text gives other numbers."


def _position_curves(observation: Observation) -> Iterator[View]:
    """Yield for each statistic one line per layer, the mean over its heads at each position."""
    for each in _shown_statistics(observation):
        lines = [
            _series(place, tuple(map(float, layer.positions)), _over_heads(layer, each.key))
            for place, layer in _layers_to_draw(observation)
            if layer.positions
        ]
        if lines:
            yield View(
                label=each.name,
                panel=Lines(
                    title=f"{each.title.format(keys=observation.keys)}, by position{_name_choice(observation)}",
                    alternative=f"One line a layer, the mean over its heads, by position: {_ends(lines)}.",
                    x_label="position of the query",
                    y_label=f"{each.name}, mean over heads",
                    series=tuple(lines),
                ),
            )


def _distributions(observation: Observation) -> Iterator[View]:
    """Yield for some statistics one line per layer: the share of queries, of all heads together, by value."""
    for each in _shown_statistics(observation):
        if each.key in _DISTRIBUTIONS:
            yield View(label=each.name, panel=_distribution(observation, each))


def _residual_curves(observation: Observation) -> Iterator[View]:
    """Yield largest activation and effective rank by layer; nothing if the residual stream was not observed."""
    known = [(float(place), seen) for place, layer in enumerate(observation.layers) if (seen := layer.residual)]
    figures = (
        ("largest activation", "The largest activation", [seen.largest for _, seen in known]),
        ("effective rank", "How many directions are in use", [seen.effective_rank for _, seen in known]),
    )
    for name, title, values in figures if known else ():
        yield View(
            label=name,
            panel=Lines(
                title=f"{title}: {values[0]:.3g} after the first layer, {values[-1]:.3g} after the last",
                alternative=f"{name} by layer: {', '.join(f'{value:.3g}' for value in values)}.",
                x_label="layer",
                y_label=name,
                series=(
                    Series(
                        label=name, group="residual stream", x=tuple(x for x, _ in known), y=tuple(map(finite, values))
                    ),
                ),
            ),
        )


def _distribution(observation: Observation, statistic: _Statistic) -> Lines:
    edges = HISTOGRAM_EDGES[statistic.key]
    by_powers = statistic.key == "effective_keys"
    middles = [math.sqrt(low * high) if by_powers else (low + high) / 2 for low, high in pairwise(edges)]
    # The histograms of all heads of a layer together.
    counts = {
        place: [sum(bins) for bins in zip(*(each.histogram for each in layer.heads[statistic.key]), strict=True)]
        for place, layer in _layers_to_draw(observation)
    }
    last = max((place for column in counts.values() for place, count in enumerate(column) if count), default=0)
    lines = tuple(
        _series(place, tuple(middles[: last + 1]), tuple(count / max(1, sum(column)) for count in column[: last + 1]))
        for place, column in counts.items()
    )
    peaks = ", ".join(
        f"{line.label} near {middles[max(range(len(line.y)), key=lambda place: line.y[place] or 0.0)]:.3g}"
        for line in lines
    )
    return Lines(
        title=f"Where single queries stand{_name_choice(observation)}",
        alternative=f"Share of queries by {statistic.name}, one line a layer. Most queries: {peaks}.",
        x_label=f"{statistic.name} of a query",
        y_label="share of queries",
        series=lines,
        log_x=by_powers,
    )


def _layers_to_draw(observation: Observation) -> list[tuple[int, LayerObservation]]:
    """Return the layers to draw, with their numbers: evenly spread if there are many, with the first and the last."""
    count = len(observation.layers)
    places = (
        range(count) if count <= _CURVES else [round(step * (count - 1) / (_CURVES - 1)) for step in range(_CURVES)]
    )
    return [(place, observation.layers[place]) for place in places]


def _name_choice(observation: Observation) -> str:
    count = len(observation.layers)
    return f" ({_CURVES} of {count} layers)" if count > _CURVES else ""


def _series(place: int, x: Numbers, y: Numbers) -> Series:
    return Series(label=f"layer {place}", group=f"layer {place}", x=x, y=y)


def _over_heads(layer: LayerObservation, key: str) -> Numbers:
    return tuple(mean_of_known(values) for values in zip(*layer.by_position[key], strict=True))


def _ends(lines: list[Series]) -> str:
    return "; ".join(f"{line.label} from {format_number(line.y[0])} to {format_number(line.y[-1])}" for line in lines)


def _shown_statistics(observation: Observation) -> list[_Statistic]:
    """Return the statistics that every layer has."""
    names = statistic_names(observation.keys)
    seen = (each for each in _STATISTICS if all(each.key in layer.heads for layer in observation.layers))
    return [replace(each, name=names[each.key]) for each in seen]


def _head_means(layer: LayerObservation, key: str) -> tuple[float | None, ...]:
    """Return a statistic's mean, head by head; None where no query was counted or a number is not finite."""
    return tuple(map(finite, layer.head_means(key)))
