"""Panels and figures of the distributions of curvature and of the caps, and the study."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tidegate.geometry import Chart, gaussian_curvature
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.flat_or_curved.run import (
    CHARTS,
    ChartCell,
    FlatOrCurvedOptions,
    FlatOrCurvedResult,
    charts_of,
    finding,
    random_layer,
    run_flat_or_curved,
)
from tidegate.lab.studies.flat_or_curved.spherical_cap import (
    PATCH,
    cap_chart,
    cap_layer,
    head_grain_chart,
    simplex_frame,
    three_features,
    ungated_chart,
)
from tidegate.lab.studies.study import Study
from tidegate.report.page import Column, Map, Maps, Section, Table
from tidegate.tensors.palette import LINES


def view(result: FlatOrCurvedResult) -> tuple[Section, ...]:
    """Return the shares of positive curvature, all distributions, and the caps."""
    return (
        Section(
            title="Gates, charts, strengths",
            lead="Relative curvature: 1 for a sphere around the origin.",
            panels=(_shares(result), _cells_table(result)),
        ),
        Section(
            title="Caps of a sphere",
            lead="Weight charts of one head over three keys, with an elementwise gate that reads the output.",
            panels=(_caps_table(result),),
        ),
    )


def figures(result: FlatOrCurvedResult) -> dict[str, Figure]:
    """Draw the distributions of slice curvature, the surfaces of all charts, and the caps."""
    return {"flat-or-curved.svg": _distributions(result), "surfaces.png": _surfaces(), "cap.png": _caps(result)}


def _shares(result: FlatOrCurvedResult) -> Maps:
    # Cells without a gate have strength 0 and come first.
    gates = sorted(result.options.gates, key=lambda gate: gate != "none")
    positive = {
        (cell.gate, cell.strength, cell.chart): cell.positive for cell in result.cells if cell.tangent == "plane"
    }
    maps: list[Map] = []
    for strength in result.options.strengths:
        rows = [(gate, 0.0 if gate == "none" else strength) for gate in gates]
        values = tuple(tuple(positive[*row, chart] for chart in CHARTS) for row in rows)
        maps.append(Map(label=f"strength {strength:g}", values=values))
    return Maps(
        title="Share of slices with positive curvature",
        alternative=f"For each strength, gates ({', '.join(gates)}) by charts ({', '.join(CHARTS)}).",
        row_label=f"gate: {', '.join(gates)}",
        column_label=f"chart: {', '.join(CHARTS)}",
        value_label="share",
        maps=tuple(maps),
        low=0.0,
    )


def _cells_table(result: FlatOrCurvedResult) -> Table:
    columns = (
        Column(title="gate"),
        Column(title="strength", digits=1, help="Standard deviation of the gate's logits."),
        Column(title="chart"),
        Column(title="tangent", help="full: the whole manifold; plane: a two-dimensional slice."),
        *(Column(title=name, digits=4, signed=True) for name in ("5 %", "25 %", "median", "75 %", "95 %")),
        Column(title="positive", digits=2, help="Share above rounding error."),
        Column(title="largest", digits=4, help="Absolute value."),
    )
    rows = tuple(
        (cell.gate, cell.strength, cell.chart, cell.tangent, *cell.quantiles, cell.positive, cell.largest)
        for cell in result.cells
    )
    return Table(title="Relative curvature", columns=columns, rows=rows)


def _caps_table(result: FlatOrCurvedResult) -> Table:
    columns = (
        Column(title="cap"),
        Column(title="features"),
        *(Column(title=name, digits=6) for name in ("minimum K", "mean K", "maximum K", "radius")),
        Column(title="distance from the sphere", unit="radii × 10⁻⁶", digits=3),
    )
    rows = tuple(
        (cap.name, float(cap.width), cap.low, cap.mean, cap.high, cap.radius, 1e6 * cap.distance) for cap in result.caps
    )
    note = f"With a headwise gate the largest |K| on the patch is {result.head_grain:.1e}."
    return Table(title="Distance from a sphere", columns=columns, rows=rows, note=note)


def _distributions(result: FlatOrCurvedResult) -> Figure:
    """Draw the middle 90 % of slice curvature for each chart, gate and strength."""
    gates = result.options.gates
    figure = new_figure(9.6, 3.6)
    all_axes: Any = figure.subplots(1, len(CHARTS), sharey=True)
    for axes, chart in zip(all_axes, CHARTS, strict=True):
        label_axes(axes, title=f"{chart} chart")
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_xscale("symlog", linthresh=0.01, linscale=0.5)
        axes.set_xlim(-30, 30)
        axes.set_xticks([-10, -0.1, 0, 0.1, 10], ["−10", "−0.1", "0", "0.1", "10"])
        for cell in result.cells:
            if cell.chart == chart and cell.tangent == "plane":
                _interval(axes, cell, gates.index(cell.gate), result.options.strengths)
    all_axes[0].set_yticks(range(len(gates)), gates)
    all_axes[0].invert_yaxis()
    handles: list[Any] = []
    for strength, color in zip(result.options.strengths, cycle(LINES), strict=False):
        handles += all_axes[0].plot([], [], color=color, linewidth=2, label=f"gate strength {strength:g}")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.suptitle("Relative slice curvature: medians and the middle 90 %", fontsize=10)
    return figure


def _interval(axes: Any, cell: ChartCell, row: int, strengths: tuple[float, ...]) -> None:
    place = strengths.index(cell.strength) if cell.strength in strengths else 1
    color = LINES[place % len(LINES)] if cell.gate != "none" else "black"
    y = row + 0.22 * (place - 1)
    low, _, median, _, high = cell.quantiles
    axes.plot([low, high], [y, y], color=color, linewidth=1.4, solid_capstyle="butt")
    axes.plot([median], [y], "o", color=color, markersize=2.6)


def _surfaces() -> Figure:
    """Draw a slice of every chart, without a gate and with one that reads the output."""
    options = FlatOrCurvedOptions()
    figure = new_figure(9.6, 4.2)
    for row, (gate, strength) in enumerate((("none", 0.0), ("output:output", 2.0))):
        layer, x = random_layer(gate, strength, options, 3)
        for column, (name, chart) in enumerate(charts_of(layer, x).items()):
            axes: Any = figure.add_subplot(2, len(CHARTS), row * len(CHARTS) + column + 1, projection="3d")
            u, v = np.linalg.qr(np.random.default_rng(5).standard_normal((chart.dimension, 2)))[0].T
            reach = 0.25 if name == "weight" else 2.0
            _surface(axes, chart.slice(torch.from_numpy(u), torch.from_numpy(v)), _square(reach))
            axes.set_title(f"{name}, {'no gate' if gate == 'none' else gate}", fontsize=8)
    figure.suptitle(
        "Slices of the charts; blue bends to the negative side, red to the positive, grey is flat", fontsize=10
    )
    return figure


def _caps(result: FlatOrCurvedResult) -> Figure:
    best = result.caps[-1].width
    named = {
        "no gate: a plane": ungated_chart(),
        "one number a head: a cylinder": head_grain_chart(),
        "a number a feature, three by hand": cap_chart(three_features()),
        f"a number a feature, {best} fitted": cap_chart(cap_layer(best)),
    }
    figure = new_figure(9.6, 2.9)
    for place, (title, chart) in enumerate(named.items()):
        axes: Any = figure.add_subplot(1, len(named), place + 1, projection="3d")
        _surface(axes, chart, _disc())
        axes.set_title(title, fontsize=8)
    figure.suptitle("One head's weight chart over three keys, with a gate that reads the output", fontsize=10)
    return figure


def _surface(axes: Any, chart: Chart, grid: NDArray[np.float64]) -> None:
    """Draw a surface over a grid (rows, columns, 2) in its three principal directions, colored by curvature."""
    points = torch.from_numpy(grid.reshape(-1, 2))
    places = torch.stack([chart(point) for point in points]).numpy()
    size = float((places**2).sum(axis=1).mean())
    curvature = gaussian_curvature(chart, points, covariance=size).numpy()
    centered = places - places.mean(axis=0)
    shape = centered @ np.linalg.svd(centered, full_matrices=False)[2][:3].T
    # The cube root keeps the sign of weak curvature visible next to strong curvature.
    colors = colormaps["coolwarm"](Normalize(-1, 1)(np.cbrt(curvature).clip(-1, 1)))
    x, y, z = (part.reshape(grid.shape[:2]) for part in shape.T)
    axes.plot_surface(x, y, z, facecolors=colors.reshape(*grid.shape[:2], 4), rcount=40, ccount=40, linewidth=0)
    # One scale for all three axes: rounding error must not look like waves.
    extent = np.ptp(shape, axis=0)
    extent = np.maximum(extent, 0.02 * extent.max())
    low = (shape.max(axis=0) + shape.min(axis=0) - extent) / 2
    axes.set(**{f"{name}lim": (low[i], low[i] + extent[i]) for i, name in enumerate("xyz")})
    axes.set_box_aspect(extent, zoom=1.05)
    axes.view_init(elev=28, azim=-55)
    axes.set_axis_off()


def _square(reach: float) -> NDArray[np.float64]:
    side = np.linspace(-reach, reach, 19)
    return np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1)


def _disc() -> NDArray[np.float64]:
    """Return the first two weights on a polar grid over the patch."""
    radius, angle = np.linspace(1e-3, PATCH, 12), np.linspace(0, 2 * np.pi, 37)
    around = np.stack([np.outer(radius, np.cos(angle)), np.outer(radius, np.sin(angle))], axis=-1)
    return 1 / 3 + (around @ simplex_frame().T)[..., :2]


STUDY = Study(
    name="flat-or-curved",
    question=QUESTIONS["flat-or-curved"],
    claim="arXiv 2604.14702 claims that ungated attention is intrinsically flat, and that multiplicative gating allows "
    "curvature, also positive. We measure five charts, which differ in the inputs that vary, and gates at chosen "
    "strengths. Magnitudes in different charts are not comparable.",
    options=FlatOrCurvedOptions(),
    result=FlatOrCurvedResult,
    run=run_flat_or_curved,
    finding=finding,
    view=view,
    figures=figures,
)
