"""Curves: bands at the back, then the faint lines, then the bold ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tidegate._json import finite
from tidegate.report.charts import Figure, axis, base_layout, horizontal_line, label, plot_numbers, vertical_line
from tidegate.report.colours import Palette
from tidegate.report.page import Lines, Numbers, Series
from tidegate.report.ticks import log_ticks, tick_text

_HEIGHT = 370
_MOST_TICKS = 12
_FEW_POINTS = 14
"""Up to so many points a line shows them."""
_LEGEND = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1.09,
    "yanchor": "bottom",
    "font": {"color": "var(--ink)"},
    "tracegroupgap": 0,
}
"""In a row above the chart."""


def lines_figure(panel: Lines, palette: Palette) -> Figure:
    """Draw the panel as a figure. Only bold lines are in the legend, and a click there hides their whole group."""
    bold = [series for series in panel.series if not series.faint]
    traces = [_band(series, palette) for series in panel.series if series.low is not None and series.high is not None]
    traces += [_faint(lines, palette) for lines in _alike([series for series in panel.series if series.faint])]
    turns: Counter[str] = Counter()
    for series in bold:
        traces.append(_bold(series, palette, turns[series.group]))
        turns[series.group] += 1
    return {"data": traces, "layout": _layout(panel, bold)}


def _layout(panel: Lines, bold: list[Series]) -> dict[str, Any]:
    has_legend = len(bold) > 1
    same_x = len({series.x for series in bold}) == 1
    return {
        **base_layout(height=_HEIGHT),
        "xaxis": _x_axis(panel),
        "yaxis": _y_axis(panel),
        "hovermode": "x unified" if same_x else "closest",
        "shapes": _shapes(panel),
        "annotations": [_y_label(panel.y_label), *_marker_label(panel)],
        "showlegend": has_legend,
        "legend": _LEGEND,
        # A legend makes room for itself above the axis' label.
        "margin": {"l": 8, "r": 14, "t": 0 if has_legend else 26, "b": 8},
    }


def _x_axis(panel: Lines) -> dict[str, Any]:
    values = [series.x for series in panel.series]
    # Tokens and FLOPs are read in millions and tera; small numbers would become micro and nano.
    is_large = any(x is not None and x >= 1e4 for numbers in values for x in numbers)
    options = axis(
        title=panel.x_label,
        showgrid=False,
        showline=True,
        exponentformat="SI" if is_large else "power",
        hoverformat=".4~s" if is_large else ".4~g",
        spikecolor="var(--soft)",
        spikedash="dot",
        spikethickness=-1,
    )
    # A few numbered things, such as layers: there is nothing between two of them.
    if not panel.log_x and _is_short_count(values):
        options["dtick"] = 1
    return options | _scale(values, logarithmic=panel.log_x)


def _is_short_count(values: list[Numbers]) -> bool:
    numbers = {x for series in values for x in series if x is not None}
    return bool(numbers) and all(x == round(x) for x in numbers) and max(numbers) - min(numbers) <= _MOST_TICKS


def _y_axis(panel: Lines) -> dict[str, Any]:
    options = axis(exponentformat="power", minexponent=5, hoverformat=".4~g")
    return options | _scale([series.y for series in panel.series], logarithmic=panel.log_y)


def _scale(values: list[Numbers], *, logarithmic: bool) -> dict[str, Any]:
    numbers = [value for series in values for value in series]
    if logarithmic:
        ticks = log_ticks(numbers)
        return {"type": "log", "tickvals": ticks, "ticktext": [tick_text(tick) for tick in ticks]}
    known = [value for value in map(finite, numbers) if value is not None]
    # What is counted from zero, and begins near it, is shown from zero.
    return {"rangemode": "tozero"} if known and 0 <= min(known) < 0.1 * max(known) else {}


def _shapes(panel: Lines) -> list[dict[str, Any]]:
    shapes = [horizontal_line(0.0)] if panel.zero_line else []
    if panel.marker is not None and _position(panel.marker, panel) is not None:
        shapes.append(vertical_line(panel.marker, dash="dot"))
    return shapes


def _y_label(text: str) -> dict[str, Any]:
    return {
        "text": label(text),
        "x": 0,
        "xanchor": "left",
        "xref": "paper",
        "y": 1,
        "yanchor": "bottom",
        "yref": "paper",
        "yshift": 5,
        "showarrow": False,
    }


def _marker_label(panel: Lines) -> Iterator[dict[str, Any]]:
    marker = _position(panel.marker, panel)
    if marker is None or not panel.marker_label:
        return
    places = [_position(x, panel) for series in panel.series for x in series.x]
    known = [marker, *(place for place in places if place is not None)]
    right = 2 * marker > min(known) + max(known)
    yield {
        "text": label(panel.marker_label),
        "x": marker,
        "xanchor": "right" if right else "left",
        "xshift": -5 if right else 5,
        "y": 1,
        "yref": "paper",
        "yanchor": "top",
        "showarrow": False,
        "bgcolor": "var(--paper)",
    }


def _position(x: float | None, panel: Lines) -> float | None:
    """Where x is along its axis, as plotly counts for words: by powers of ten on a logarithmic one."""
    x = finite(x)
    if x is None or not panel.log_x:
        return x
    return math.log10(x) if x > 0 else None


def _alike(faint: list[Series]) -> list[list[Series]]:
    """Gather the lines of each group, and its single points: nobody can point at them, and a trace of each is slow."""
    gathered: dict[tuple[str, bool], list[Series]] = {}
    for series in faint:
        gathered.setdefault((series.group, len(series.x) > 1), []).append(series)
    return list(gathered.values())


def _faint(lines: list[Series], palette: Palette) -> dict[str, Any]:
    """One trace of all these lines, parted by None."""
    first = lines[0]
    x, y = list(first.x), list(first.y)
    for series in lines[1:]:
        x += [None, *series.x]
        y += [None, *series.y]
    return {
        **_trace(Series(label=first.group, group=first.group, x=tuple(x), y=tuple(y))),
        "mode": "lines" if len(first.x) > 1 else "markers",
        "line": {"color": palette.colour(first.group), "width": 1},
        "marker": {"color": palette.colour(first.group), "size": 4},
        "opacity": 0.28,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _bold(series: Series, palette: Palette, turn: int) -> dict[str, Any]:
    colour = palette.colour(series.group)
    return {
        **_trace(series),
        "mode": "lines" if len(series.x) > _FEW_POINTS else "lines+markers",
        "line": {"color": colour, "width": 2.4, "dash": palette.dash(series.group, turn)},
        "marker": {"color": colour, "size": 6},
        "showlegend": True,
    }


def _trace(series: Series) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": label(series.label),
        "meta": series.label,
        "legendgroup": label(series.group),
        "x": plot_numbers(series.x),
        "y": plot_numbers(series.y),
        "connectgaps": False,
    }


def _band(series: Series, palette: Palette) -> dict[str, Any]:
    x, y = _outline(series)
    return {
        "type": "scatter",
        "name": label(series.label),
        "legendgroup": label(series.group),
        "x": plot_numbers(x),
        "y": plot_numbers(y),
        "fill": "toself",
        "fillcolor": palette.colour(series.group),
        "line": {"width": 0, "color": palette.colour(series.group)},
        "mode": "lines",
        "opacity": 0.14,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _outline(series: Series) -> tuple[Numbers, Numbers]:
    """Outline the band, with a closed outline for each stretch without gaps, parted by None."""
    x: list[float | None] = []
    y: list[float | None] = []
    for stretch in _stretches(series):
        if x:
            x.append(None)
            y.append(None)
        places, lows, highs = zip(*stretch, strict=True)
        x += [*places, *reversed(places)]
        y += [*lows, *reversed(highs)]
    return tuple(x), tuple(y)


def _stretches(series: Series) -> list[list[tuple[float, float, float]]]:
    stretches: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(series.x, series.low or (), series.high or (), strict=True):
        x, low, high = finite(x), finite(low), finite(high)
        if x is None or low is None or high is None:
            stretches.append([])
        else:
            stretches[-1].append((x, low, high))
    return [stretch for stretch in stretches if stretch]
