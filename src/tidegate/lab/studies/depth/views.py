"""Curvature over depth, as panels."""

from __future__ import annotations

import numpy as np

from tidegate.lab.studies.depth.run import WHERE, DepthCurve, DepthResult
from tidegate.lab.studies.drawing import interval_panel
from tidegate.report.page import Column, Lines, Panel, Section, Series, Table

_TANGENTS = {"plane": "of slices", "full": "of the whole image"}


def view(result: DepthResult) -> tuple[Section, ...]:
    """Show curves, exponents and a table for each regime."""
    return tuple(
        Section(
            title=WHERE[regime],
            lead=f"Medians of the absolute relative curvature {_TANGENTS[result.options.tangent]}; bold: the geometric "
            "mean over seeds.",
            panels=_panels(result, [curve for curve in result.curves if curve.regime == regime]),
        )
        for regime in result.options.regimes
    )


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
        interval_panel(
            "Local exponents of |K| in depth L: one power would have the same all along",
            "exponent, 95 % intervals over seeds",
            {
                f"{curve.gate}, {each.shallow} to {each.deep}": each
                for curve in bent
                for each in curve.local_exponents(result.options.depths)
            },
            form=".2f",
        ),
        _table(result, curves),
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
