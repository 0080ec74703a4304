"""Measure which gates curve which charts of attention: random layers, and layers whose chart is part of a sphere.

Curvature is relative, K times the squared length of the chart's output: 1 for a sphere around the origin. The strength
of a gate is the standard deviation of its logits over the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tidegate._validation import InputError
from tidegate.geometry import (
    Chart,
    GeometryError,
    depth_chart,
    frozen_weight_chart,
    input_chart,
    query_chart,
    weight_chart,
)
from tidegate.lab.studies.curved_layers import FLAT, initialized_layer, relative_curvature
from tidegate.lab.studies.flat_or_curved.spherical_cap import (
    Cap,
    cap_chart,
    cap_layer,
    head_grain_chart,
    measure_cap,
    three_features,
)
from tidegate.lab.studies.options import require_at_least, require_gates
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.measurements import QUANTILES
from tidegate.tensors.layer import AttentionArrays

CHARTS = ("weight", "frozen-weight", "query", "input", "depth")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatOrCurvedOptions:
    """Gates, sizes and the number of repetitions."""

    gates: tuple[str, ...] = (
        "none",
        "bma",
        "bma-query",
        "g1",
        "g1-head",
        "g2",
        "g3",
        "g4",
        "g5",
        "vga",
        "output:output",
        "output:output:head",
    )
    strengths: tuple[float, ...] = (0.1, 0.5, 2.0)
    num_layers: int = 8
    """Random layers per cell, each with its own sequence."""
    num_planes: int = 40
    """Planes per layer."""
    d_model: int = 12
    num_heads: int = 2
    length: int = 10
    cap_widths: tuple[int, ...] = (8, 16, 32, 64)

    def __post_init__(self) -> None:
        require_gates(self.gates)
        require_at_least(self, num_layers=1, num_planes=1, length=2)
        if not self.strengths or min(self.strengths) <= 0:
            raise InputError("strengths", expected="one or more positive numbers", got=self.strengths)
        if not self.cap_widths or min(self.cap_widths) < 3:
            raise InputError("cap_widths", expected="one or more widths of at least 3", got=self.cap_widths)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartCell:
    """The distribution of curvature for one gate at one strength in one chart."""

    gate: str
    strength: float
    """0 without a gate."""
    chart: str
    tangent: Literal["full", "plane"]
    count: int
    """Number of planes."""
    quantiles: tuple[float, ...]
    """5, 25, 50, 75 and 95 %."""
    positive: float
    """Share of planes with curvature above rounding error."""
    largest: float
    """Largest absolute curvature."""

    @property
    def flat(self) -> bool:
        """Return whether there is only rounding error."""
        return self.largest < FLAT


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatOrCurvedResult:
    """All distributions, and the caps."""

    options: FlatOrCurvedOptions
    cells: tuple[ChartCell, ...]
    caps: tuple[Cap, ...]
    head_grain: float
    """Largest absolute curvature of the patch under a headwise gate."""


def run_flat_or_curved(options: FlatOrCurvedOptions, *, tell: Tell = ignore) -> FlatOrCurvedResult:
    """Measure every gate in every chart at every strength, and build the caps."""
    layers = [
        (gate, strength) for gate in options.gates for strength in ((0.0,) if gate == "none" else options.strengths)
    ]
    parts = report_parts(layers, tell, work="flat-or-curved", describe=lambda part: f"{part[0]}, strength {part[1]:g}")
    cells = tuple(cell for gate, strength in parts for cell in _cells(gate, strength, options))
    by_hand = measure_cap("three features, by hand", cap_chart(three_features()), 3)
    fitted = (measure_cap(f"{width} features", cap_chart(cap_layer(width)), width) for width in options.cap_widths)
    cylinder = measure_cap("one gate a head", head_grain_chart(), 32)
    return FlatOrCurvedResult(
        options=options, cells=cells, caps=(by_hand, *fitted), head_grain=max(abs(cylinder.low), abs(cylinder.high))
    )


def random_layer(
    gate: str, strength: float, options: FlatOrCurvedOptions, seed: int
) -> tuple[AttentionArrays, torch.Tensor]:
    """Return an initialized layer with gates of a given strength, and a normal sequence (T, d)."""
    torch.manual_seed(seed)
    x = torch.randn(options.length, options.d_model, dtype=torch.float64)
    return initialized_layer(gate, x, strength, num_heads=options.num_heads), x


def charts_of(layer: AttentionArrays, x: torch.Tensor) -> dict[str, Chart]:
    """Return the five charts; weight and query charts are of one head, unless a dense gate mixes all heads."""
    head = 0 if layer.gates.at("dense") is None else None
    # With fewer keys than channels, the weight chart of a head has a codimension.
    few = layer.shape.head_dim - 1
    return {
        "weight": weight_chart(layer, x, position=few - 1, head=head),
        "frozen-weight": frozen_weight_chart(layer, x, moving=1),
        "query": query_chart(layer, x, head=head),
        "input": input_chart(layer, x, moving=1),
        "depth": depth_chart([layer, layer], x, moving=1),
    }


def finding(result: FlatOrCurvedResult) -> str:
    """State the result in sentences."""
    flat = {name: ", ".join(_gates(result, name, flat=True)) or "no gate" for name in CHARTS[:2]}
    bent = {name: ", ".join(_gates(result, name, flat=False)) or "no gate" for name in CHARTS[:2]}
    by_hand, best = result.caps[0], result.caps[-1]
    planes = [cell for cell in result.cells if cell.gate == "none" and cell.tangent == "plane"]
    ungated = ", ".join(f"{100 * cell.positive:.0f} % in the {cell.chart} chart" for cell in planes if not cell.flat)
    ungated = (
        "In the other charts slices are curved even without a gate, mostly negatively; their positive share without a "
        f"gate is {ungated}. {_widening(result)} "
        if ungated
        else ""
    )
    return (
        f"The weight chart is flat to rounding error with {flat['weight']} and curved with {bent['weight']}. Slices of "
        f"the frozen-weight chart are flat with {flat['frozen-weight']} and curved with {bent['frozen-weight']}. "
        f"{ungated}An elementwise gate that reads the output gives the weight chart a patch of strictly positive "
        f"curvature: with three features, by hand, between {by_hand.low:.3f} and {by_hand.high:.3f}; with {best.width} "
        f"fitted features a cap of the unit sphere up to 60° from its pole, whose curvature differs from 1 by at most "
        f"{max(1 - best.low, best.high - 1):.1e} and whose distance from the sphere is at most {best.distance:.1e} "
        f"radii. With a headwise gate the patch stays developable (|K| at most {result.head_grain:.1e}); without a "
        "gate it is a plane."
    )


def _widening(result: FlatOrCurvedResult) -> str:
    """Count the gates with a wider spread of slice curvature than without a gate, by chart and strength."""
    widths = {
        (cell.chart, cell.gate, cell.strength): cell.quantiles[-1] - cell.quantiles[0]
        for cell in result.cells
        if cell.tangent == "plane"
    }
    gates = [gate for gate in result.options.gates if gate != "none"]
    counts = {
        chart: [
            sum(widths[chart, gate, strength] > widths[chart, "none", 0.0] for gate in gates)
            for strength in result.options.strengths
        ]
        for chart in CHARTS[2:]
    }
    strengths = ", ".join(f"{strength:g}" for strength in result.options.strengths)
    words = ", ".join(f"{chart} chart {', '.join(map(str, found))}" for chart, found in counts.items())
    return (
        f"Of {len(gates)} gates, the number whose middle 90 % of slice curvature is wider than without a gate, at the "
        f"strengths {strengths}: {words}."
    )


def _gates(result: FlatOrCurvedResult, chart: str, *, flat: bool) -> list[str]:
    """List the gates whose slices are flat at every strength, or curved at every strength."""
    cells = [cell for cell in result.cells if cell.chart == chart and cell.tangent == "plane"]
    return [gate for gate in result.options.gates if all(cell.flat == flat for cell in cells if cell.gate == gate)]


def _cells(gate: str, strength: float, options: FlatOrCurvedOptions) -> Iterator[ChartCell]:
    found: dict[tuple[str, Literal["full", "plane"]], list[np.ndarray]] = {}
    for seed in range(options.num_layers):
        layer, x = random_layer(gate, strength, options, seed)
        for name, chart in charts_of(layer, x).items():
            for tangent in ("full", "plane"):
                found.setdefault((name, tangent), []).append(_curvatures(chart, tangent, options.num_planes, seed))
    for (name, tangent), parts in found.items():
        values = np.concatenate(parts)
        if tangent == "plane" or len(values):
            yield ChartCell(
                gate=gate,
                strength=strength,
                chart=name,
                tangent=tangent,
                count=len(values),
                quantiles=tuple(np.quantile(values, QUANTILES).tolist()),
                positive=float((values > FLAT).mean()),
                largest=float(np.abs(values).max()),
            )


def _curvatures(chart: Chart, tangent: Literal["full", "plane"], count: int, seed: int) -> np.ndarray:
    """Measure relative curvatures of random planes; empty if full curvature is trivial or the Jacobian lacks rank."""
    if tangent == "full" and not chart.says_something:
        return np.empty(0)
    u, v = np.random.default_rng(seed).standard_normal((2, count, chart.dimension))
    try:
        return relative_curvature(chart, u, v, tangent=tangent)
    except GeometryError:
        if tangent == "plane":
            raise
        return np.empty(0)
