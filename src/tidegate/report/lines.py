"""Line charts: bands, then thin lines, then bold lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from tidegate._json import finite
from tidegate.report.charts import (
    Figure,
    Palette,
    axis,
    base_layout,
    horizontal_line,
    label,
    plot_numbers,
    vertical_line,
)
from tidegate.report.page import Lines, Numbers, Series

_HEIGHT = 370
_MOST_TICKS = 12
_FEW_TICKS = 9
_TICK_RATIO = 1.4
"""Up to `_FEW_TICKS` values of a logarithmic axis have their own ticks, if each is larger by at least this factor."""
_FEW_POINTS = 14
"""Lines with more points have no markers."""
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
    """Return the figure of the panel. Only bold lines are in the legend; a click there hides their group."""
    bold = [series for series in panel.series if not series.faint]
    traces = [_band(series, palette) for series in panel.series if series.low is not None and series.high is not None]
    # A trace for each thin line is slow: one for all lines of a group, and one for its single points.
    faint: dict[tuple[str, bool], list[Series]] = {}
    for series in panel.series:
        if series.faint:
            faint.setdefault((series.group, len(series.x) > 1), []).append(series)
    traces += [_faint(lines, palette) for lines in faint.values()]
    turns: Counter[str] = Counter()
    for series in bold:
        traces.append(_bold(series, palette, turns[series.group]))
        turns[series.group] += 1
    return {"data": traces, "layout": _layout(panel, bold)}


def _layout(panel: Lines, bold: list[Series]) -> dict[str, Any]:
    has_legend = len(bold) > 1
    same_x = len({series.x for series in bold}) == 1
    y_axis = axis(exponentformat="power", minexponent=5, hoverformat=".4~g")
    shapes = [horizontal_line(0.0)] if panel.zero_line else []
    if panel.marker is not None:
        shapes.append(vertical_line(panel.marker, dash="dot"))
    return {
        **base_layout(height=_HEIGHT),
        "xaxis": _x_axis(panel),
        "yaxis": y_axis | _scale([series.y for series in panel.series], logarithmic=panel.log_y),
        "hovermode": "x unified" if same_x else "closest",
        "shapes": shapes,
        "annotations": [_y_label(panel.y_label), *_marker_label(panel)],
        "showlegend": has_legend,
        "legend": _LEGEND,
        # The legend adds its own margin above the axis label.
        "margin": {"l": 8, "r": 14, "t": 0 if has_legend else 26, "b": 8},
    }


def _x_axis(panel: Lines) -> dict[str, Any]:
    values = [series.x for series in panel.series]
    numbers = {x for series in values for x in series if x is not None}
    # SI prefixes for tokens and FLOPs; small numbers would become micro and nano.
    is_large = any(x >= 1e4 for x in numbers)
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
    # A few integers, such as layers: no ticks between them.
    is_count = bool(numbers) and all(x == round(x) for x in numbers) and max(numbers) - min(numbers) <= _MOST_TICKS
    if is_count and not panel.log_x:
        options["dtick"] = 1
    return options | _scale(values, logarithmic=panel.log_x)


def _scale(values: list[Numbers], *, logarithmic: bool) -> dict[str, Any]:
    numbers = [value for series in values for value in series]
    if logarithmic:
        ticks = log_ticks(numbers)
        return {"type": "log", "tickvals": ticks, "ticktext": [tick_text(tick) for tick in ticks]}
    known = [value for value in map(finite, numbers) if value is not None]
    # Positive values that start near zero are shown from zero.
    return {"rangemode": "tozero"} if known and 0 <= min(known) < 0.1 * max(known) else {}


def log_ticks(values: Iterable[float | None]) -> list[float]:
    """Return the ticks of a logarithmic axis for the positive ones of these values.

    Plotly's are powers of ten, too few for a narrow range. A few different values are their own ticks; a narrow range
    has round numbers at equal steps, a wider range 1, 2 and 5 in each decade, a wide range powers of ten.
    """
    numbers = sorted({value for value in values if value is not None and 0 < value < math.inf})
    apart = all(high >= _TICK_RATIO * low for low, high in pairwise(numbers))
    if len(numbers) < 3 or (apart and len(numbers) <= _FEW_TICKS):
        return numbers
    low, high = numbers[0], numbers[-1]
    decades = math.log10(high / low)
    if decades < 0.7:
        rough = (high - low) / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    digits = (1, 2, 5) if decades < 3 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in exponents for digit in digits if low <= (tick := digit * 10.0**power) <= high]


def tick_text(value: float) -> str:
    """Return a tick label: with separators up to ten thousand, then with k, M, G, T, P, E."""
    if not 1e4 <= abs(value) < 1e21:
        return f"{value:,.4g}" if 1e-4 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"
    power = math.floor(math.log10(abs(value)) / 3)
    return f"{value / 1000.0**power:.4g}{'kMGTPE'[power - 1]}"


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
    """Yield the marker's label, on the side of the chart's middle."""
    if panel.marker is None or not panel.marker_label:
        return
    known = [panel.marker, *(x for series in panel.series for x in series.x if x is not None)]
    if panel.log_x:
        # Plotly places annotations of a logarithmic axis by exponent.
        known = [math.log10(x) for x in known if x > 0]
    right = 2 * known[0] > min(known) + max(known)
    yield {
        "text": label(panel.marker_label),
        "x": known[0],
        "xanchor": "right" if right else "left",
        "xshift": -5 if right else 5,
        "y": 1,
        "yref": "paper",
        "yanchor": "top",
        "showarrow": False,
        "bgcolor": "var(--paper)",
    }


def _faint(lines: list[Series], palette: Palette) -> dict[str, Any]:
    """Return a single trace of these lines, separated by None."""
    first = lines[0]
    x, y = list(first.x), list(first.y)
    for series in lines[1:]:
        x += [None, *series.x]
        y += [None, *series.y]
    return {
        **_trace(Series(label=first.group, group=first.group, x=tuple(x), y=tuple(y))),
        "mode": "lines" if len(first.x) > 1 else "markers",
        "line": {"color": palette.color(first.group), "width": 1},
        "marker": {"color": palette.color(first.group), "size": 4},
        "opacity": 0.28,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _bold(series: Series, palette: Palette, turn: int) -> dict[str, Any]:
    color = palette.color(series.group)
    return {
        **_trace(series),
        "mode": "lines" if len(series.x) > _FEW_POINTS else "lines+markers",
        "line": {"color": color, "width": 2.4, "dash": palette.dash(series.group, turn)},
        "marker": {"color": color, "size": 6},
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
    """Return the band as closed outlines of the stretches without gaps, separated by None."""
    x: list[float | None] = []
    y: list[float | None] = []
    stretch: list[tuple[float, float, float]] = []
    points = zip(series.x, series.low or (), series.high or (), strict=True)
    for place, low, high in (*(map(finite, point) for point in points), (None, None, None)):
        if place is not None and low is not None and high is not None:
            stretch.append((place, low, high))
        elif stretch:
            places, lows, highs = zip(*stretch, strict=True)
            x += [*([None] if x else []), *places, *reversed(places)]
            y += [*([None] if y else []), *lows, *reversed(highs)]
            stretch = []
    return {
        "type": "scatter",
        "name": label(series.label),
        "legendgroup": label(series.group),
        "x": plot_numbers(tuple(x)),
        "y": plot_numbers(tuple(y)),
        "fill": "toself",
        "fillcolor": palette.color(series.group),
        "line": {"width": 0, "color": palette.color(series.group)},
        "mode": "lines",
        "opacity": 0.14,
        "hoverinfo": "skip",
        "showlegend": False,
    }
