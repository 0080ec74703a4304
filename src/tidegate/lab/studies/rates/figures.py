"""Figures of the study of rates."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from tidegate.lab.studies.drawing import COLOURS, GREY, new_figure, quiet
from tidegate.lab.studies.rates.result import RatesResult

_DASHES = ("-", "--", ":", "-.")


def draw(result: RatesResult) -> dict[str, Figure]:
    """Figures by file name."""
    return {"expert-rates.svg": _rates(result), "expert-limits.svg": _limits(result)}


def _rates(result: RatesResult) -> Figure:
    """Expert errors beside the regression errors of the same fits."""
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    styles = _styles(result)
    for axes, metric in ((left, "expert"), (right, "regression")):
        for found in result.rates:
            curve, style = found.errors[metric], styles[found.position]
            axes.plot(curve.x, curve.median, label=found.position, linewidth=1.6, **style)
            axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.08, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
    quiet(left, title="Expert error: where a gate stands on each expert, it falls", x="samples n", y="expert error")
    quiet(right, title="Regression error of the same fits: it falls everywhere", x="samples n", y="root mean square")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=7.5, frameon=False)
    return figure


def _limits(result: RatesResult) -> Figure:
    """The error by the start, and by the distance of the gates."""
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    styles = _styles(result)
    for found in result.start_radius:
        left.plot(
            found.error.x, found.error.median, marker="o", markersize=3, label=found.position, **styles[found.position]
        )
    for position in result.settings.gated_positions if result.near_gates else ():
        own = [near for near in result.near_gates if near.position == position]
        distances, errors = [near.distance for near in own], [near.error for near in own]
        right.plot(distances, errors, marker="o", markersize=3, **styles[position])
    for found in result.rates:
        if found.position == "none" and result.near_gates:
            right.axhline(found.errors["expert"].median[-1], color=GREY, linewidth=1)
            right.annotate(
                "no gate",
                (1, found.errors["expert"].median[-1]),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=7.5,
            )
    settings = result.settings
    for axes, ticks in ((left, settings.start_radii), (right, settings.gate_distances)):
        if not axes.lines:
            axes.set_axis_off()
            continue
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    size, largest = settings.start_n, max(settings.ns)
    quiet(
        left,
        title="Without such a gate, the error is the start's",
        x="radius of the starts",
        y=f"expert error, n = {size:,}",
    )
    quiet(
        right,
        title="Gates that nearly coincide take the advantage away",
        x="distance of the two true gates",
        y=f"expert error, n = {largest:,}",
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=7.5, frameon=False)
    return figure


def _styles(result: RatesResult) -> dict[str, dict[str, Any]]:
    """Positions without a gate on each expert in greys, told apart by dashes; the others in colours."""
    plain = [found.position for found in result.rates if not found.gated]
    gated = [found.position for found in result.rates if found.gated]
    greys = {
        position: {"color": GREY, "linestyle": _DASHES[place % len(_DASHES)]} for place, position in enumerate(plain)
    }
    return greys | {
        position: {"color": COLOURS[place % len(COLOURS)], "linestyle": "-"} for place, position in enumerate(gated)
    }
