"""Curvature over depth, as panels and a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tidegate.lab.studies.depth.run import WHERE, DepthCurve, DepthResult
from tidegate.lab.studies.drawing import COLOURS, label_axes, new_figure
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Column, Estimate, Intervals, Lines, Panel, Section, Series, Table

_TANGENTS = {"plane": "of slices", "full": "of the whole image"}


def view(result: DepthResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    return StudyView(sections=_sections(result), figures=_figures(result))


def _sections(result: DepthResult) -> tuple[Section, ...]:
    """Curves, exponents and a table for each regime."""
    return tuple(
        Section(
            title=WHERE[regime],
            lead=f"Medians of the absolute relative curvature {_TANGENTS[result.options.tangent]}; bold: the geometric "
            "mean over seeds.",
            panels=_panels(result, [curve for curve in result.curves if curve.regime == regime]),
        )
        for regime in result.options.regimes
    )


def _figures(result: DepthResult) -> dict[str, Figure]:
    """Curvature against depth, one plot a regime."""
    depths = result.options.depths
    regimes = result.options.regimes
    figure = new_figure(4.0 * len(regimes), 3.2)
    all_axes: Any = figure.subplots(1, len(regimes), squeeze=False)[0]
    for axes, regime in zip(all_axes, regimes, strict=True):
        label_axes(axes, title=WHERE[regime], x="layers", y="median |K|, relative")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.xaxis.set_minor_locator(NullLocator())
        for place, gate in enumerate(result.options.gates):
            curve = next(curve for curve in result.curves if curve.regime == regime and curve.gate == gate)
            _draw_curve(axes, curve, depths, COLOURS[place] if gate != "none" else "black")
        axes.legend(fontsize=7, frameon=False)
    return {"depth.svg": figure}


def _draw_curve(axes: Any, curve: DepthCurve, depths: tuple[int, ...], colour: str) -> None:
    if curve.flat:
        axes.plot([], [], color=colour, label=f"{curve.gate}: flat to rounding")
        return
    axes.plot(depths, np.array(curve.medians).T, color=colour, linewidth=0.4, alpha=0.35)
    exponents = curve.local_exponents(depths)
    label = f"{curve.gate}: L^{exponents[0].value:.1f} … L^{exponents[-1].value:.1f}"
    axes.plot(depths, curve.levels, "o-", color=colour, markersize=3, label=label)


def _panels(result: DepthResult, curves: list[DepthCurve]) -> tuple[Panel, ...]:
    bent = [curve for curve in curves if not curve.flat]
    depths = tuple(float(depth) for depth in result.options.depths)
    series: list[Series] = []
    for curve in bent:
        series += [Series(label=curve.gate, group=curve.gate, x=depths, y=row, faint=True) for row in curve.medians]
        series.append(Series(label=curve.gate, group=curve.gate, x=depths, y=curve.levels))
    return (
        Lines(
            title="Curvature against the number of layers",
            alternative="Lines over depth, one colour a gate, one thin line a seed.",
            x_label="layers",
            y_label="median |K|, relative",
            series=tuple(series),
            log_x=True,
            log_y=True,
        ),
        Intervals(
            title="Local exponents of |K| in depth L: one power would have the same all along",
            alternative="; ".join(
                f"{item.label} {item.value:.2f}" for item in _exponents(result, bent) if item.value is not None
            ),
            x_label="exponent, 95 % intervals over seeds",
            items=_exponents(result, bent),
        ),
        _table(result, curves),
    )


def _exponents(result: DepthResult, curves: list[DepthCurve]) -> tuple[Estimate, ...]:
    return tuple(
        Estimate(label=f"{curve.gate}, {each.shallow} to {each.deep}", value=each.value, low=each.low, high=each.high)
        for curve in curves
        for each in curve.local_exponents(result.options.depths)
    )


def _table(result: DepthResult, curves: list[DepthCurve]) -> Table:
    fits = ("exponent of L", "low", "high", "residual (nats)", "rate a layer", "low", "high", "residual (nats)")
    columns = (
        Column(title="gate"),
        *(Column(title=f"|K|, L = {depth}", digits=4) for depth in result.options.depths),
        *(Column(title=f"positive, L = {depth}", digits=2) for depth in result.options.depths),
        *(Column(title=name, digits=3) for name in fits),
    )
    rows = tuple(
        (
            curve.gate,
            *np.median(np.array(curve.medians), axis=0).tolist(),
            *curve.positive,
            *(number for growth in curve.growth for number in (growth.slope, growth.low, growth.high, growth.residual)),
            *(None for _ in range(0 if curve.growth else len(fits))),
        )
        for curve in curves
    )
    return Table(title="By gate", columns=columns, rows=rows, note="Empty fits: flat to rounding.")
