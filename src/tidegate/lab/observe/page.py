"""What was seen in a model's attention, as a page: maps by layer and head, curves, and all the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tidegate._json import finite
from tidegate.lab.observe.curves import distributions, in_stretches, position_curves, residual_curves
from tidegate.lab.observe.statistics import head_means, known_mean, measured, written
from tidegate.report.page import Column, Map, Maps, Numbers, Page, Panel, Prose, Section, Snippet, Table, View, Views

if TYPE_CHECKING:
    from tidegate.torch.observing.observation import GateSummary, LayerObservation, Observation

GateFigure: TypeAlias = "Callable[[GateSummary], Sequence[float] | None]"

_GATE_FIGURES: tuple[tuple[str, str, GateFigure], ...] = (
    ("mean gate", "How open the gates stand", lambda gate: gate.mean),
    ("share below 0.1", "How often gates are shut", lambda gate: gate.below),
    ("saturated share", "How often gates are near an end of their range", lambda gate: gate.saturated),
    ("spread over tokens", "How much gates depend on the token", lambda gate: gate.token_spread),
)


def observation_page(observation: Observation, *, model: str, command: str, num_sequences: int, length: int) -> Page:
    """The page of one model, observed on sequences of some length; a `ValueError` if no attention was seen.

    Its data hold the observation, curves by position at most 128 points long.
    """
    if not observation.layers:
        raise ValueError(
            f"MODEL {model} made no attention call that can be watched. Its attention must run through PyTorch's "
            "scaled_dot_product_attention, as with the implementation sdpa of transformers."
        )
    shown = in_stretches(observation)
    num_heads = sum(layer.num_heads for layer in observation.layers)
    sequences = "one sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    return Page(
        title=f"Attention of {model}",
        summary=f"Attention layers: {len(observation.layers)}, with {num_heads} heads in all, watched on {sequences} "
        f"of {length} tokens. The sink is {observation.keys}.",
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
    """Maps and curves of attention, of gates and the residual stream if they were seen; how to read them; tables."""
    parts: list[tuple[str, str, Iterator[View]]] = [
        ("Attention", "By layer and head", _attention_maps(observation)),
        ("Attention", "By position of the query", position_curves(observation)),
        ("Attention", "Distribution over queries", distributions(observation)),
        ("Gates", "By layer and head", _gate_maps(observation)),
        ("Residual stream", "By layer", residual_curves(observation)),
    ]
    panels: dict[str, list[Panel]] = {}
    for section, title, views in parts:
        if shown := tuple(views):
            panels.setdefault(section, []).append(Views(title=title, views=shown))
    panels["How to read it"] = [Prose(paragraphs=tuple(_reading(observation)))]
    panels["All numbers"] = [_head_table(observation), _layer_table(observation)]
    return tuple(Section(title=title, panels=tuple(inside)) for title, inside in panels.items())


def _attention_maps(observation: Observation) -> Iterator[View]:
    for each in measured(observation):
        rows = [head_means(layer, each.key) for layer in observation.layers]
        title = f"{each.title.format(keys=observation.keys)}: {_extremes(rows, each.digits)}"
        yield View(label=each.name, panel=_maps(title, each.name, {"every head": rows}, from_zero=each.from_zero))


def _gate_maps(observation: Observation) -> Iterator[View]:
    for name, title, figure in _GATE_FIGURES:
        every = {site: [_of_gate(layer, site, figure) for layer in observation.layers] for site in _sites(observation)}
        maps = {site: rows for site, rows in every.items() if any(rows)}
        if maps:
            words = "; ".join(f"{site} {_extremes(rows, 3)}" for site, rows in maps.items())
            yield View(label=name, panel=_maps(f"{title}: {words}", name, maps, from_zero=True))


def _of_gate(layer: LayerObservation, site: str, figure: GateFigure) -> Numbers:
    """One number a head of the site; none where the layer has no such gate, or the gate no such number."""
    values = figure(layer.gates[site]) if site in layer.gates else None
    return tuple(map(finite, values or ()))


def _sites(observation: Observation) -> list[str]:
    return list(dict.fromkeys(site for layer in observation.layers for site in layer.gates))


def _maps(title: str, name: str, maps: Mapping[str, Sequence[Numbers]], *, from_zero: bool) -> Maps:
    words = "; ".join(
        f"{label}: " + ", ".join(f"layer {place} {written(known_mean(row))}" for place, row in enumerate(rows))
        for label, rows in maps.items()
    )
    return Maps(
        title=title,
        alternative=f"{name} by layer and head. Means of layers: {words}.",
        row_label="layer",
        column_label="head",
        value_label=name,
        maps=tuple(Map(label=label, values=_filled(rows)) for label, rows in maps.items()),
        low=0.0 if from_zero else None,
    )


def _filled(rows: Sequence[Numbers]) -> tuple[Numbers, ...]:
    """Rows of one length, empty cells where a layer has fewer heads."""
    width = max(map(len, rows))
    return tuple((*row, *[None] * (width - len(row))) for row in rows)


def _head_table(observation: Observation) -> Table:
    statistics, sites = measured(observation), _sites(observation)
    columns = (
        Column(title="layer"),
        Column(title="head"),
        *(Column(title=each.name, digits=each.digits) for each in statistics),
        *(
            Column(title=f"{name}, spread", digits=3, help="Standard deviation over queries.")
            for name in ("sink mass", "entropy")
        ),
        *(Column(title=f"{site}: {name}", digits=3) for site in sites for name, _, _ in _GATE_FIGURES[:2]),
    )
    rows = tuple(
        (
            float(place),
            float(head),
            *(head_means(layer, each.key)[head] for each in statistics),
            *(finite(layer.heads[key][head].std) for key in ("mass", "entropy")),
            *(_serving(layer, site, figure, head) for site in sites for _, _, figure in _GATE_FIGURES[:2]),
        )
        for place, layer in enumerate(observation.layers)
        for head in range(layer.num_heads)
    )
    return Table(title="Heads: means over queries", columns=columns, rows=rows)


def _serving(layer: LayerObservation, site: str, figure: GateFigure, head: int) -> float | None:
    """The number of the gate that serves a query head: its group's at a site with fewer heads."""
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
    """The mean over heads, and the head that has most."""
    cells = [
        (value, place, head) for place, row in enumerate(rows) for head, value in enumerate(row) if value is not None
    ]
    if not cells:
        return "no number"
    most, place, head = max(cells)
    average = sum(value for value, _, _ in cells) / len(cells)
    return f"{average:.{digits}f} on average, most {most:.{digits}f} (layer {place}, head {head})"


def _reading(observation: Observation) -> Iterator[str]:
    """What the numbers mean, for what was seen."""
    yield (
        f"Sink mass is the share of a query's attention weight that falls on {observation.keys}. Sink impact weighs "
        "each key by the length of its value: the share of the sink in what the head takes in. Large mass with small "
        "impact is a head that parks its attention where it does nothing."
    )
    yield (
        "Entropy says how evenly a query spreads its weight, in nats; its exponential is the effective number of keys: "
        "n for equal weights on n keys. All of it is computed query by query, and then averaged over queries and "
        "sequences. The first query of a causal model sees itself alone: mass 1 and entropy 0, whatever the model does."
    )
    if any("heat_capacity" in layer.heads for layer in observation.layers):
        yield (
            "The heat capacity is the variance of a query's scores under its own weights: how fast its mean score "
            "answers to the temperature."
        )
    if _sites(observation):
        yield (
            "A gate multiplies a tensor: 1 lets it through, below 0.1 next to nothing passes. Spread over tokens is a "
            "standard deviation: a gate that has none is a constant."
        )
    if any(layer.residual for layer in observation.layers):
        yield (
            "The residual stream is what a block hands on. Its effective rank is the exponential of the entropy of its "
            "singular values, scaled to sum 1: how many directions it makes use of."
        )
    yield "This is one model on one text; another text gives other numbers."
