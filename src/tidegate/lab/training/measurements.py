"""Measurements of trained models as plain data: curvature of their layers, gauge of their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate._validation import require_sizes

Part: TypeAlias = Literal["attention", "block"]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles by which a distribution of curvature is recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The points at which the curvature of a model is measured."""

    part: Part = "attention"
    """Only the attention, from its input to its output, or the whole block."""
    num_positions: int = 4
    """Per sequence, evenly spread, without the first, which sees only itself."""
    num_planes: int = 16
    """At each position."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_sizes(num_positions=self.num_positions, num_planes=self.num_planes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCurvature:
    """The slices of one layer."""

    layer: int
    count: int
    quantiles: tuple[float, ...]
    """Relative curvature at `QUANTILES`."""
    magnitude: float
    """Median of the absolute value."""
    positive: float
    """Share of positive curvature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCurvature:
    """All layers of one model."""

    model: str
    sampling: Sampling
    num_sequences: int
    length: int
    layers: tuple[LayerCurvature, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGauge:
    """The channel mixtures of each head that leave a layer's output unchanged: a `ChannelGauge` as JSON."""

    layer: str
    free: tuple[int, ...]
    """For each key/value head."""
    predicted: int | None
    """The number that theory predicts for every head; None where it predicts none."""
    singular_values: tuple[tuple[float, ...], ...]
    """For each key/value head, in descending order: how strongly the data determine each mixture."""
