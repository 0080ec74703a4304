"""The observation of a model's attention, gates and residual stream: plain data to read, save and draw."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from tidegate._json import add_checksum, decode, parse_json, verify_checksum, without_nan
from tidegate._text import number_of
from tidegate._validation import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARES = tuple(index / 20 for index in range(21))
_NATS = tuple(index / 2 for index in range(25))
_SCORES = tuple(float(score) for score in range(-32, 33, 2))


class _Statistic(NamedTuple):
    """Name, histogram and number format of a statistic of a head."""

    name: str
    """`{keys}` stands for the key set."""
    edges: tuple[float, ...] = ()
    """Edges of its histogram, if it has one."""
    digits: int | None = None
    """Decimal places in the table; None omits it."""


_STATISTICS = {
    "entropy": _Statistic("entropy (nats)", _NATS, 3),
    "effective_keys": _Statistic("effective keys", tuple(2.0**power for power in range(21)), 2),
    "mass": _Statistic("{keys} mass", _SHARES, 4),
    "impact": _Statistic("{keys} impact", _SHARES, 4),
    "contribution": _Statistic("{keys} contribution", (), 4),
    "sink": _Statistic("sink-logit mass", _SHARES, 4),
    "mean_score": _Statistic("mean score", _SCORES),
    "max_score": _Statistic("largest score", _SCORES),
    "heat_capacity": _Statistic("heat capacity", (0.0, *(2.0**power for power in range(-10, 11)))),
}

HISTOGRAM_EDGES = {key: each.edges for key, each in _STATISTICS.items() if each.edges}
"""Edges of the histogram of each statistic; values outside count in the nearest bin."""

CLOSED_BELOW = 0.1
"""A gate counts as closed below this value."""


def statistic_names(keys: str) -> dict[str, str]:
    """Return the names of a head's statistics in tables, pages and figures, for a key set in words."""
    start = "the first "
    key_set = "first-key" if keys == f"{start}key" else "first-keys" if keys.startswith(start) else "key-set"
    return {key: each.name.format(keys=key_set) for key, each in _STATISTICS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """One statistic of one head over all queries that may see more than one key; all 0 if there are none.

    Other queries, such as the first of a causal row, are only in `LayerObservation.by_position`.
    """

    count: int
    mean: float
    std: float
    """Square root of the mean squared deviation: 0 for a single query."""
    low: float
    high: float
    histogram: tuple[int, ...]
    """Counts between the edges in `HISTOGRAM_EDGES`; a value on an edge counts above it.

    Empty for `contribution`, whose unit is known only at the end.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSummary:
    """The values of a gate, one number per head of its site; the dense site is one head."""

    mean: tuple[float, ...]
    below: tuple[float, ...]
    """Share of the values below `CLOSED_BELOW`, 0.1."""
    saturated: tuple[float, ...] | None
    """Share of the values within 0.05 of an end of the activation's range; None unless it has two ends."""
    token_spread: tuple[float, ...]
    """Standard deviation between tokens, divided by n, averaged over the channels of the head."""
    head_spread: float
    """Standard deviation between the means of the heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualSummary:
    """The residual stream after the block that contains the layer."""

    largest: float
    """Largest magnitude of an activation."""
    effective_rank: float
    """Exponential of the entropy of the singular values, normalized to sum 1; 0 for a stream of zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerObservation:
    """The observation of one attention layer."""

    name: str
    """Path of the layer in the model, as in `model.layers.0.self_attn`."""
    num_heads: int
    heads: dict[str, tuple[Moments, ...]]
    """By statistic, one for each head; `contribution` is missing if the layer's output is unknown.

    `sink`, the weight on the sink's logit, is present if the layer has one; mass and entropy then include it.
    """
    positions: tuple[int, ...]
    """The query positions at which every head has a counted query, in ascending order."""
    by_position: dict[str, tuple[tuple[float, ...], ...]]
    """By statistic, the means of each head at `positions`."""
    gates: dict[str, GateSummary]
    """By site; the last of several gates at one site."""
    residual: ResidualSummary | None

    def head_means(self, statistic: str) -> tuple[float, ...]:
        """Return the statistic's mean for each head, nan if no query counted; empty if the statistic is missing."""
        return tuple(moments.mean if moments.count else math.nan for moments in self.heads.get(statistic, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The observation of a model, layer by layer in the order of their first call."""

    layers: tuple[LayerObservation, ...]
    num_batches: int
    """Number of outermost calls, of the model or a part of it, that attended."""
    keys: str
    """The key set of mass, impact and contribution, in words."""

    def table(self) -> str:
        """Format a table with one line per layer and head: statistics of the key set, entropy, and mean gates."""
        sites = tuple(dict.fromkeys(site for layer in self.layers for site in layer.gates))
        names = statistic_names(self.keys)
        has_sink = any("sink" in layer.heads for layer in self.layers)
        shown = {
            key: each.digits
            for key, each in _STATISTICS.items()
            if each.digits is not None and (key != "sink" or has_sink)
        }
        rows = [["layer", "head", *(names[key] for key in shown), *(f"{site} gate" for site in sites)]]
        for layer in self.layers:
            for head in range(layer.num_heads):
                row = [layer.name, str(head)]
                for key, digits in shown.items():
                    moments = layer.heads[key][head] if key in layer.heads else None
                    row.append(f"{moments.mean:.{digits}f}" if moments and moments.count else "-")
                for site in sites:
                    means = layer.gates[site].mean if site in layer.gates else ()
                    # A site with fewer heads has one gate per group of query heads.
                    row.append(f"{means[head * len(means) // layer.num_heads]:.4f}" if means else "-")
                rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        title = f"{number_of(self.num_batches, 'batch')}; mass, impact and contribution of {self.keys}"
        return "\n".join([title, *lines])

    def downsample(self, num_points: int) -> Observation:
        """Return the observation with at most `num_points` points per curve, each a mean over consecutive positions."""
        if num_points < 1:
            raise InputError("num_points", expected="at least 1", got=num_points)
        return replace(self, layers=tuple(_downsample_curves(layer, num_points) for layer in self.layers))

    def to_json(self) -> str:
        """Return the observation as JSON with a checksum; numbers that are not finite become null."""
        return json.dumps(add_checksum(without_nan(asdict(self))), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of `to_json`, null as nan. Raise InputError for any other text."""
        try:
            return decode(cls, verify_checksum(parse_json(text)), null_is_nan=True)
        except ValueError as problem:
            expected = "the JSON text that Observation.to_json returned"
            raise InputError("text", expected=expected, hint=f"The problem: {problem}") from None

    def figure(self) -> Figure:
        """Return a matplotlib figure with maps of layers and heads, and curves over positions."""
        # Only drawing needs matplotlib.
        from tidegate.torch.observing.figure import observation_figure

        return observation_figure(self)


def _downsample_curves(layer: LayerObservation, num_points: int) -> LayerObservation:
    count = len(layer.positions)
    if count <= num_points:
        return layer
    size = math.ceil(count / num_points)
    parts = [slice(start, start + size) for start in range(0, count, size)]
    return replace(
        layer,
        positions=tuple(sum(layer.positions[part]) // len(layer.positions[part]) for part in parts),
        by_position={
            name: tuple(tuple(sum(head[part]) / len(head[part]) for part in parts) for head in heads)
            for name, heads in layer.by_position.items()
        },
    )
