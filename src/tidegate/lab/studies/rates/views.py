"""The study of rates as sections of a page and as figures: what can be estimated, how fast, why, and the limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from tidegate.lab.studies.drawing import COLOURS, GREY, label_axes, new_figure
from tidegate.lab.studies.rates.panels import (
    caution,
    error_panels,
    gauge_table_panel,
    modulus_panels,
    near_gates_panels,
    slope_intervals,
    slope_table,
    start_panel,
    surplus_table,
    truths_table,
)
from tidegate.lab.studies.rates.result import RatesResult
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Panel, Section

_DASHES = ("-", "--", ":", "-.")


def view(result: RatesResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    figures = {"expert-rates.svg": _draw_rates(result), "expert-limits.svg": _draw_limits(result)}
    return StudyView(sections=tuple(_sections(result)), figures=figures)


def _sections(result: RatesResult) -> Iterator[Section]:
    options = result.options
    yield Section(
        title="Slopes and verdicts",
        lead=f"Two experts, {options.replicates} replicates of {options.starts} starts, n to {max(options.ns):,}.",
        panels=(slope_intervals(result), slope_table(result)),
    )
    yield Section(
        title="Experts and predictions of the same fits",
        lead="Lines are medians over replicates; bands hold 80 % of them.",
        panels=error_panels(result),
    )
    yield Section(
        title="What no data can tell",
        lead="Directions of a layer's parameters in which no output changes.",
        panels=(gauge_table_panel(result),),
    )
    yield Section(
        title="How much the function must change",
        lead="One expert is held away from its true value and all else is fitted; what is left, data can see.",
        panels=modulus_panels(result),
    )
    yield Section(
        title="Where the fit began",
        lead="Starts lie around the truth at a fixed radius. What is not identified keeps their error.",
        panels=(start_panel(result),),
    )
    yield Section(title="Limits", panels=tuple(_limits(result)))


def _limits(result: RatesResult) -> Iterator[Panel]:
    yield from near_gates_panels(result)
    yield from (table for table in (truths_table(result), surplus_table(result)) if table is not None)
    yield caution(result)


def _draw_rates(result: RatesResult) -> Figure:
    """Expert errors beside the regression errors of the same fits."""
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    styles = _styles(result)
    for axes, metric in ((left, "expert"), (right, "regression")):
        for found in result.rates:
            curve, style = found.errors[metric], styles[found.placement]
            axes.plot(curve.x, curve.median, label=found.placement, linewidth=1.6, **style)
            axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.08, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
    label_axes(
        left, title="Expert error: where a gate stands on each expert, it falls", x="samples n", y="expert error"
    )
    label_axes(
        right, title="Regression error of the same fits: it falls everywhere", x="samples n", y="root mean square"
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=7.5, frameon=False)
    return figure


def _draw_limits(result: RatesResult) -> Figure:
    """The error by the start, and by the distance of the gates."""
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    styles = _styles(result)
    for found in result.start_radius:
        left.plot(
            found.error.x,
            found.error.median,
            marker="o",
            markersize=3,
            label=found.placement,
            **styles[found.placement],
        )
    for placement in result.options.gated_placements if result.near_gates else ():
        own = [near for near in result.near_gates if near.placement == placement]
        distances, errors = [near.distance for near in own], [near.error for near in own]
        right.plot(distances, errors, marker="o", markersize=3, **styles[placement])
    for found in result.rates:
        if found.placement == "none" and result.near_gates:
            right.axhline(found.errors["expert"].median[-1], color=GREY, linewidth=1)
            right.annotate(
                "no gate",
                (1, found.errors["expert"].median[-1]),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=7.5,
            )
    options = result.options
    for axes, ticks in ((left, options.start_radii), (right, options.gate_distances)):
        if not axes.lines:
            axes.set_axis_off()
            continue
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    size, largest = options.start_n, max(options.ns)
    label_axes(
        left,
        title="Without such a gate, the error is the start's",
        x="radius of the starts",
        y=f"expert error, n = {size:,}",
    )
    label_axes(
        right,
        title="Gates that nearly coincide take the advantage away",
        x="distance of the two true gates",
        y=f"expert error, n = {largest:,}",
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=7.5, frameon=False)
    return figure


def _styles(result: RatesResult) -> dict[str, dict[str, Any]]:
    """Placements without a gate on each expert in greys, told apart by dashes; the others in colours."""
    plain = [found.placement for found in result.rates if not found.gated]
    gated = [found.placement for found in result.rates if found.gated]
    greys = {
        placement: {"color": GREY, "linestyle": _DASHES[place % len(_DASHES)]} for place, placement in enumerate(plain)
    }
    return greys | {
        placement: {"color": COLOURS[place % len(COLOURS)], "linestyle": "-"} for place, placement in enumerate(gated)
    }
