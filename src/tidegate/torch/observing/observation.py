"""What was seen of a model's attention, gates and residual stream: plain data, to read, to keep and to draw."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Self

from tidegate._json import open_sealed, parse_json, read_as, seal, without_nan
from tidegate._text import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARES = tuple(index / 20 for index in range(21))
_NATS = tuple(index / 2 for index in range(25))
_SCORES = tuple(float(score) for score in range(-32, 33, 2))

HISTOGRAM_EDGES: dict[str, tuple[float, ...]] = {
    "entropy": _NATS,
    "effective_keys": tuple(2.0**power for power in range(21)),
    "mass": _SHARES,
    "sink": _SHARES,
    "impact": _SHARES,
    "mean_score": _SCORES,
    "max_score": _SCORES,
    "heat_capacity": (0.0, *(2.0**power for power in range(-10, 11))),
}
"""Between which numbers the values of each statistic are counted; what lies outside goes to the nearest end."""

CLOSED_BELOW = 0.1
"""A gate's value below this lets next to nothing through."""

_TABLE_DIGITS = {"entropy": 3, "effective_keys": 2, "mass": 4, "impact": 4, "contribution": 4, "sink": 4}


def statistic_names(keys: str) -> dict[str, str]:
    """Return what tables, pages and figures call the statistics of a head.

    keys : the key set of mass, impact and contribution, in words; they are called after it, and never after a sink
    """
    start = "the first "
    key_set = "first-key" if keys == f"{start}key" else "first-keys" if keys.startswith(start) else "key-set"
    return {
        "mass": f"{key_set} mass",
        "sink": "sink-logit mass",
        "impact": f"{key_set} impact",
        "contribution": f"{key_set} contribution",
        "entropy": "entropy (nats)",
        "effective_keys": "effective keys",
        "mean_score": "mean score",
        "max_score": "largest score",
        "heat_capacity": "heat capacity",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """One statistic of one head over all queries that may see more than one key; all 0 if there were none.

    A query that may see a single key, such as the first of a causal row, has all its weight there, whatever the model
    does. It is left out here, and kept in `LayerObservation.by_position`.
    """

    count: int
    mean: float
    std: float
    """Square root of the mean squared deviation: 0 for a single query."""
    low: float
    high: float
    histogram: tuple[int, ...]
    """How many values lie between one edge of `HISTOGRAM_EDGES` and the next; a value on an edge lies above it.

    Empty for `contribution`, whose unit is known only at the end.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSummary:
    """What a gate lets through, one number a head of its site; the dense site is one head."""

    mean: tuple[float, ...]
    below: tuple[float, ...]
    """Share of the values below `CLOSED_BELOW`, 0.1."""
    saturated: tuple[float, ...] | None
    """Share of the values within 0.05 of an end of the activation's range; None where it has no two ends."""
    token_spread: tuple[float, ...]
    """Standard deviation between tokens, by n and not n - 1, averaged over the features of the head."""
    head_spread: float
    """Standard deviation between the means of the heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualSummary:
    """The residual stream after the block that holds the layer."""

    largest: float
    """Largest magnitude of an activation."""
    effective_rank: float
    """Exponential of the entropy of the singular values, normalised to sum 1; 0 for a stream of zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerObservation:
    """All that was seen of one attention layer."""

    name: str
    """Where the layer is in the model, as in `model.layers.0.self_attn`."""
    num_heads: int
    heads: dict[str, tuple[Moments, ...]]
    """By statistic, one for each head; `contribution` is missing where the layer's output could not be seen.

    `sink`, the weight on the logit of a sink, is there if the layer has one; mass and entropy then count it in.
    """
    positions: tuple[int, ...]
    """The query positions at which every head had something to count, rising."""
    by_position: dict[str, tuple[tuple[float, ...], ...]]
    """By statistic, for each head its mean at each of `positions`."""
    gates: dict[str, GateSummary]
    """By site; of several gates at one site the last."""
    residual: ResidualSummary | None

    def head_means(self, statistic: str) -> tuple[float, ...]:
        """Return the statistic's mean for each head, nan where no query was counted; empty if it was not seen."""
        return tuple(moments.mean if moments.count else math.nan for moments in self.heads.get(statistic, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a model's attention did while it was watched, layer by layer in the order of their first call."""

    layers: tuple[LayerObservation, ...]
    num_batches: int
    """Outermost calls of the model, or of a part of it, that attended."""
    keys: str
    """The key set of mass, impact and contribution, in words."""

    def table(self) -> str:
        """Format one line for each layer and head: statistics of the key set, entropy, and the mean of each gate."""
        sites = tuple(dict.fromkeys(site for layer in self.layers for site in layer.gates))
        names = statistic_names(self.keys)
        has_sink = any("sink" in layer.heads for layer in self.layers)
        statistics = [name for name in _TABLE_DIGITS if name != "sink" or has_sink]
        rows = [("layer", "head", *(names[name] for name in statistics), *(f"{site} gate" for site in sites))]
        for layer in self.layers:
            rows += [_row(layer, head, statistics, sites) for head in range(layer.num_heads)]
        batches = number_of(self.num_batches, "batch")
        return f"{batches}; mass, impact and contribution of {self.keys}\n{_align_columns(rows)}"

    def in_stretches(self, num_points: int) -> Observation:
        """Return the same with at most so many points a curve, each the mean of a stretch of positions around it."""
        if num_points < 1:
            raise ValueError(f"num_points must be at least 1; got {num_points}.")
        return replace(self, layers=tuple(_curves_in_stretches(layer, num_points) for layer in self.layers))

    def to_json(self) -> str:
        """Return the observation as JSON with a digest of its content; a number that is not finite is null."""
        return json.dumps(seal(without_nan(asdict(self))), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; null where a number should be is nan. What was changed since is refused."""
        try:
            return read_as(cls, open_sealed(parse_json(text)), null_is_nan=True)
        except ValueError as problem:
            raise ValueError(f"text must be what Observation.to_json wrote: {problem}") from None

    def figure(self) -> Figure:
        """Draw maps of layers and heads, and curves over positions, as a matplotlib figure."""
        # Drawing needs matplotlib, which observing does not.
        from tidegate.torch.observing.figure import observation_figure

        return observation_figure(self)


def _curves_in_stretches(layer: LayerObservation, num_points: int) -> LayerObservation:
    count = len(layer.positions)
    if count <= num_points:
        return layer
    size = math.ceil(count / num_points)
    stretches = [slice(start, start + size) for start in range(0, count, size)]
    return replace(
        layer,
        positions=tuple(sum(layer.positions[part]) // len(layer.positions[part]) for part in stretches),
        by_position={
            name: tuple(tuple(sum(head[part]) / len(head[part]) for part in stretches) for head in heads)
            for name, heads in layer.by_position.items()
        },
    )


def _row(layer: LayerObservation, head: int, statistics: Sequence[str], sites: tuple[str, ...]) -> tuple[str, ...]:
    moments = {statistic: by_head[head] for statistic, by_head in layer.heads.items() if by_head[head].count}
    numbers = [
        f"{moments[statistic].mean:.{_TABLE_DIGITS[statistic]}f}" if statistic in moments else "-"
        for statistic in statistics
    ]
    gates = [_gate_mean(layer.gates.get(site), head, layer.num_heads) for site in sites]
    return (layer.name, str(head), *numbers, *gates)


def _gate_mean(gate: GateSummary | None, head: int, num_heads: int) -> str:
    """The mean of the gate that serves a query head: its group's at a site with fewer heads."""
    return "-" if gate is None else f"{gate.mean[head * len(gate.mean) // num_heads]:.4f}"


def _align_columns(rows: list[tuple[str, ...]]) -> str:
    """Columns two spaces apart, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(lines)
