"""Make a page of an observation: maps by layer and head, curves, and tables of all numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tidegate._json import finite
from tidegate._text import number_of
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
from tidegate.torch.observing import CLOSED_BELOW, HISTOGRAM_EDGES, LayerObservation, Observation, statistic_names

_GATE_METRICS = (
    ("mean", "mean gate", "Mean gate"),
    ("below", f"share below {CLOSED_BELOW}", f"Share of gate values below {CLOSED_BELOW}"),
    ("saturated", "saturated share", "Share of gate values near an end of their range"),
    ("token_spread", "spread over tokens", "Standard deviation of gates over tokens"),
)
"""Fields of `GateSummary`, with a name and a title."""

_POINTS = 128
"""Points of a curve over positions."""
_CURVES = 7
"""Layers that are drawn as curves: the number of colors."""
_DISTRIBUTIONS = ("mass", "impact", "entropy", "effective_keys")


class _Statistic(NamedTuple):
    """One statistic of a head."""

    key: str
    """Its name in an observation."""
    title: str
    """`{keys}` stands for the key set."""
    digits: int = 3
    from_zero: bool = True
    """Whether its color scale begins at 0."""


_STATISTICS = (
    _Statistic("mass", "Attention weight on {keys}"),
    _Statistic("sink", "Attention weight on the sink logit"),
    _Statistic("impact", "Share of {keys} in the weighted value norms"),
    _Statistic("contribution", "Contribution of {keys} to the output of a layer, in units of that output"),
    _Statistic("entropy", "Entropy of the attention weights"),
    _Statistic("effective_keys", "Effective number of keys", digits=1),
    _Statistic("mean_score", "Mean score under the weights", from_zero=False),
    _Statistic("max_score", "Largest score of a query", from_zero=False),
    _Statistic("heat_capacity", "Variance of the scores under the weights"),
)


def observation_page(observation: Observation, *, model: str, command: str, num_sequences: int, length: int) -> Page:
    """Return the page of one model; its data include the observation, with at most 128 points per curve."""
    shown = observation.downsample(_POINTS)
    num_heads = sum(layer.num_heads for layer in observation.layers)
    return Page(
        title=f"Attention of {model}",
        summary=f"{number_of(len(observation.layers), 'attention layer')} with {num_heads} heads in total, observed on "
        f"{number_of(num_sequences, 'sequence')} of {length} tokens. The key set is {observation.keys}.",
        sections=(
            *observation_sections(shown),
            Section(title="Reproduce", panels=(Snippet(title="Command", text=command),)),
        ),
        data={
            "model": model,
            "num_sequences": num_sequences,
            "length": length,
            "observation": json.loads(shown.to_json()),
        },
    )


def observation_sections(observation: Observation) -> tuple[Section, ...]:
    """Return maps, curves, explanations, and tables of all numbers."""
    parts = [
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
    for each, name in _shown_statistics(observation):
        rows = [_head_means(layer, each.key) for layer in observation.layers]
        title = f"{each.title.format(keys=observation.keys)}: {_extremes(rows, each.digits)}"
        panel = layer_head_maps(title, name, {"every head": rows}, from_zero=each.from_zero)
        yield View(label=name, panel=panel)


def _gate_maps(observation: Observation) -> Iterator[View]:
    for metric, name, title in _GATE_METRICS:
        every = {site: [_of_gate(layer, site, metric) for layer in observation.layers] for site in _sites(observation)}
        maps = {site: rows for site, rows in every.items() if any(rows)}
        if maps:
            words = "; ".join(f"{site} {_extremes(rows, 3)}" for site, rows in maps.items())
            yield View(label=name, panel=layer_head_maps(f"{title}: {words}", name, maps))


def _of_gate(layer: LayerObservation, site: str, metric: str) -> Numbers:
    """Return one number per head of the site; none if the layer has no such gate, or the gate no such number."""
    return tuple(map(finite, getattr(layer.gates.get(site), metric, None) or ()))


def _sites(observation: Observation) -> list[str]:
    return list(dict.fromkeys(site for layer in observation.layers for site in layer.gates))


def _head_table(observation: Observation) -> Table:
    statistics, sites = _shown_statistics(observation), _sites(observation)
    columns = (
        Column(title="layer"),
        Column(title="head"),
        *(Column(title=name, digits=each.digits) for each, name in statistics),
        *(
            Column(title=f"{name}, spread", digits=3, help="Standard deviation over queries.")
            for name in (statistic_names(observation.keys)["mass"], "entropy")
        ),
        *(Column(title=f"{site}: {name}", digits=3) for site in sites for _, name, _ in _GATE_METRICS[:2]),
    )
    rows: list[tuple[float | None, ...]] = []
    for place, layer in enumerate(observation.layers):
        for head in range(layer.num_heads):
            means = [_head_means(layer, each.key)[head] for each, _ in statistics]
            spreads = [finite(layer.heads[key][head].std) for key in ("mass", "entropy")]
            gates = [_of_gate(layer, site, metric) for site in sites for metric, _, _ in _GATE_METRICS[:2]]
            # A site with fewer heads has one gate per group of query heads.
            of_head = [values[head * len(values) // layer.num_heads] if values else None for values in gates]
            rows.append((float(place), float(head), *means, *spreads, *of_head))
    return Table(title="Heads: means over queries", columns=columns, rows=tuple(rows))


def _layer_table(observation: Observation) -> Table:
    sites = _sites(observation)
    columns = (
        Column(title="layer"),
        Column(title="module"),
        Column(title="heads"),
        Column(title="largest activation", digits=2),
        Column(title="effective rank", digits=1),
        *(
            Column(title=f"{site}: spread between heads", digits=4, help="Standard deviation of the heads' mean gates.")
            for site in sites
        ),
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
    """Return the mean over heads and the largest value with its head, in words."""
    cells = [
        (value, place, head) for place, row in enumerate(rows) for head, value in enumerate(row) if value is not None
    ]
    if not cells:
        return "no number"
    largest, place, head = max(cells)
    average = sum(value for value, _, _ in cells) / len(cells)
    return f"{average:.{digits}f} on average, at most {largest:.{digits}f} (layer {place}, head {head})"


def _explanations(observation: Observation) -> Iterator[str]:
    """Yield explanations of the numbers on the page."""
    names, keys = statistic_names(observation.keys), observation.keys
    mass, impact, contribution, sink = (names[name].capitalize() for name in ("mass", "impact", "contribution", "sink"))
    yield (
        f"{mass} is the share of a query's attention weight on {keys}. {impact} also weights each key by the norm of "
        "its value. A head with large mass and small impact puts its attention where it has no effect."
    )
    if any("contribution" in layer.heads for layer in observation.layers):
        yield (
            f"{impact} is a share, which an output gate does not change. {contribution} is a size: the norm of the "
            f"part of a head's output that comes from {keys}, after the output gate, relative to the root mean square "
            "norm of the outputs of all heads together."
        )
    if any("sink" in layer.heads for layer in observation.layers):
        yield (
            f"{sink} is the weight on a sink: an extra logit in the softmax denominator that belongs to no key. Sink, "
            f"{names['mass']} and the weight on the other keys sum to 1, and entropy counts the sink as one more key."
        )
    yield (
        "Entropy, in nats, measures how evenly a query spreads its weight; its exponential is the effective number of "
        "keys: n for equal weights on n keys. Statistics are computed for each query and averaged over queries and "
        "sequences. Queries that can see only one key, such as the first of a causal model, are left out of means and "
        "distributions and included in curves by position."
    )
    if any("heat_capacity" in layer.heads for layer in observation.layers):
        yield (
            "The heat capacity is the variance of a query's scores under its own weights: the response of its mean "
            "score to the temperature."
        )
    if _sites(observation):
        yield (
            f"A gate multiplies a tensor: 1 passes it unchanged, and below {CLOSED_BELOW} almost nothing passes. The "
            "spread over tokens is a standard deviation; it is 0 for a constant gate."
        )
    if any(layer.residual for layer in observation.layers):
        yield (
            "The residual stream is the output of a block. Its effective rank, the exponential of the entropy of its "
            "normalized singular values, is roughly the number of directions in use."
        )
    yield "These numbers describe one model on one text; other texts give other numbers."


def _position_curves(observation: Observation) -> Iterator[View]:
    """Yield for each statistic one line per layer, the mean over its heads at each position."""
    for each, name in _shown_statistics(observation):
        lines: list[Series] = []
        for place, layer in _layers_to_draw(observation):
            means = tuple(mean_of_known(values) for values in zip(*layer.by_position[each.key], strict=True))
            if means:
                lines.append(_series(place, tuple(map(float, layer.positions)), means))
        ends = "; ".join(
            f"{line.label} from {format_number(line.y[0])} to {format_number(line.y[-1])}" for line in lines
        )
        panel = Lines(
            title=f"{each.title.format(keys=observation.keys)}, by position{_name_choice(observation)}",
            alternative=f"One line per layer, the mean over its heads, by position: {ends}.",
            x_label="position of the query",
            y_label=f"{name}, mean over heads",
            series=tuple(lines),
        )
        if lines:
            yield View(label=name, panel=panel)


def _residual_curves(observation: Observation) -> Iterator[View]:
    """Yield largest activation and effective rank by layer; nothing if the residual stream was not observed."""
    known = [(float(place), seen) for place, layer in enumerate(observation.layers) if (seen := layer.residual)]
    metrics = (
        ("largest activation", [seen.largest for _, seen in known]),
        ("effective rank", [seen.effective_rank for _, seen in known]),
    )
    for name, values in metrics if known else ():
        x, y = tuple(place for place, _ in known), tuple(map(finite, values))
        panel = Lines(
            title=f"{name.capitalize()}: {values[0]:.3g} after the first layer, {values[-1]:.3g} after the last",
            alternative=f"{name} by layer: {', '.join(f'{value:.3g}' for value in values)}.",
            x_label="layer",
            y_label=name,
            series=(Series(label=name, group="residual stream", x=x, y=y),),
        )
        yield View(label=name, panel=panel)


def _distributions(observation: Observation) -> Iterator[View]:
    """Yield for some statistics one line per layer: the share of queries of all heads by value."""
    for each, name in _shown_statistics(observation):
        if each.key not in _DISTRIBUTIONS:
            continue
        by_powers = each.key == "effective_keys"
        bins = pairwise(HISTOGRAM_EDGES[each.key])
        middles = [math.sqrt(low * high) if by_powers else (low + high) / 2 for low, high in bins]
        # The histograms of all heads of a layer, summed.
        counts = {
            place: [sum(column) for column in zip(*(head.histogram for head in layer.heads[each.key]), strict=True)]
            for place, layer in _layers_to_draw(observation)
        }
        size = 1 + max((bin_ for bins in counts.values() for bin_, count in enumerate(bins) if count), default=0)
        lines = tuple(
            _series(place, tuple(middles[:size]), tuple(count / max(1, sum(bins)) for count in bins[:size]))
            for place, bins in counts.items()
        )
        peaks = ", ".join(
            f"layer {place} near {middles[max(range(size), key=bins.__getitem__)]:.3g}"
            for place, bins in counts.items()
        )
        panel = Lines(
            title=f"Distribution over queries{_name_choice(observation)}",
            alternative=f"Share of queries by {name}, one line per layer. Most queries: {peaks}.",
            x_label=f"{name} of a query",
            y_label="share of queries",
            series=lines,
            log_x=by_powers,
        )
        yield View(label=name, panel=panel)


def _layers_to_draw(observation: Observation) -> list[tuple[int, LayerObservation]]:
    """Return the layers to draw, with their numbers: evenly spread if there are many, including first and last."""
    layers = list(enumerate(observation.layers))
    if len(layers) <= _CURVES:
        return layers
    return [layers[round(step * (len(layers) - 1) / (_CURVES - 1))] for step in range(_CURVES)]


def _name_choice(observation: Observation) -> str:
    count = len(observation.layers)
    return f" ({_CURVES} of {count} layers)" if count > _CURVES else ""


def _series(place: int, x: Numbers, y: Numbers) -> Series:
    return Series(label=f"layer {place}", group=f"layer {place}", x=x, y=y)


def _shown_statistics(observation: Observation) -> list[tuple[_Statistic, str]]:
    """Return the statistics that all layers have, with their names for the key set of the observation."""
    names = statistic_names(observation.keys)
    seen = (each for each in _STATISTICS if all(each.key in layer.heads for layer in observation.layers))
    return [(each, names[each.key]) for each in seen]


def _head_means(layer: LayerObservation, key: str) -> tuple[float | None, ...]:
    """Return a statistic's mean for each head; None if no query counted or a number is not finite."""
    return tuple(map(finite, layer.head_means(key)))
