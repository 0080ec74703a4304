"""Curves of an observation: by position of the query, as distributions over queries, and by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tidegate._json import finite
from tidegate.lab.observe.statistics import Statistic, known_mean, measured, written
from tidegate.report.page import Lines, Numbers, Series, View

if TYPE_CHECKING:
    from tidegate.torch.observing.observation import LayerObservation, Observation

_STRETCHES = 128
"""Points of a curve over positions."""
_CURVES = 7
"""Layers that have a curve of their own: as many as there are colours."""
_DISTRIBUTIONS = ("mass", "impact", "entropy", "effective_keys")


def in_stretches(observation: Observation) -> Observation:
    """The observation with at most 128 points a curve, each the mean of a stretch of positions around it."""
    return replace(observation, layers=tuple(map(_layer_in_stretches, observation.layers)))


def position_curves(observation: Observation) -> Iterator[View]:
    """For each statistic one line a layer, the mean over its heads at each position."""
    for each in measured(observation):
        lines = [
            _series(place, tuple(map(float, layer.positions)), _over_heads(layer, each.key))
            for place, layer in _chosen(observation)
            if layer.positions
        ]
        if lines:
            yield View(
                label=each.name,
                panel=Lines(
                    title=f"{each.title.format(keys=observation.keys)}, by position{_choice(observation)}",
                    alternative=f"One line a layer, the mean over its heads, by position: {_ends(lines)}.",
                    x_label="position of the query",
                    y_label=f"{each.name}, mean over heads",
                    series=tuple(lines),
                ),
            )


def distributions(observation: Observation) -> Iterator[View]:
    """For some statistics one line a layer: the share of queries, of all heads together, by value."""
    for each in measured(observation):
        if each.key in _DISTRIBUTIONS:
            yield View(label=each.name, panel=_distribution(observation, each))


def residual_curves(observation: Observation) -> Iterator[View]:
    """Largest activation and effective rank by layer; nothing if the residual stream was not seen."""
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


def _distribution(observation: Observation, statistic: Statistic) -> Lines:
    # The edges stand beside the tensors; pages of other things are made without them.
    from tidegate.torch.observing.observation import HISTOGRAM_EDGES

    edges = HISTOGRAM_EDGES[statistic.key]
    by_powers = statistic.key == "effective_keys"
    middles = [math.sqrt(low * high) if by_powers else (low + high) / 2 for low, high in pairwise(edges)]
    counts = {place: _pooled(layer, statistic.key) for place, layer in _chosen(observation)}
    last = max((place for column in counts.values() for place, count in enumerate(column) if count), default=0)
    lines = tuple(
        _series(place, tuple(middles[: last + 1]), tuple(count / max(1, sum(column)) for count in column[: last + 1]))
        for place, column in counts.items()
    )
    peaks = ", ".join(f"{line.label} near {middles[_peak(line.y)]:.3g}" for line in lines)
    return Lines(
        title=f"Where single queries stand{_choice(observation)}",
        alternative=f"Share of queries by {statistic.name}, one line a layer. Most queries: {peaks}.",
        x_label=f"{statistic.name} of a query",
        y_label="share of queries",
        series=lines,
        log_x=by_powers,
    )


def _pooled(layer: LayerObservation, key: str) -> list[int]:
    """The histogram of all heads together."""
    return [sum(counts) for counts in zip(*(moments.histogram for moments in layer.heads[key]), strict=True)]


def _peak(values: Numbers) -> int:
    return max(range(len(values)), key=lambda place: values[place] or 0.0)


def _chosen(observation: Observation) -> list[tuple[int, LayerObservation]]:
    """Layers to draw, with their numbers: evenly spread where there are many, the first and the last among them."""
    count = len(observation.layers)
    places = (
        range(count) if count <= _CURVES else [round(step * (count - 1) / (_CURVES - 1)) for step in range(_CURVES)]
    )
    return [(place, observation.layers[place]) for place in places]


def _choice(observation: Observation) -> str:
    count = len(observation.layers)
    return f" ({_CURVES} of {count} layers)" if count > _CURVES else ""


def _series(place: int, x: Numbers, y: Numbers) -> Series:
    return Series(label=f"layer {place}", group=f"layer {place}", x=x, y=y)


def _over_heads(layer: LayerObservation, key: str) -> Numbers:
    return tuple(known_mean(values) for values in zip(*layer.by_position[key], strict=True))


def _ends(lines: list[Series]) -> str:
    return "; ".join(f"{line.label} from {written(line.y[0])} to {written(line.y[-1])}" for line in lines)


def _layer_in_stretches(layer: LayerObservation) -> LayerObservation:
    count = len(layer.positions)
    if count <= _STRETCHES:
        return layer
    size = math.ceil(count / _STRETCHES)
    stretches = [slice(start, start + size) for start in range(0, count, size)]
    return replace(
        layer,
        positions=tuple(sum(layer.positions[part]) // len(layer.positions[part]) for part in stretches),
        by_position={
            name: tuple(tuple(_mean(head[part]) for part in stretches) for head in heads)
            for name, heads in layer.by_position.items()
        },
    )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)
