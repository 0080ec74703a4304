"""The charts of intervals and maps, and the common parts of all charts: layout, axes, colors of groups.

Figures are JSON objects for plotly.js. Colors are CSS variables of `style.css`, resolved when the page is drawn in its
light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tidegate._json import finite
from tidegate.report.formats import estimate_digits, estimate_text, number_text, scale_digits, typographic
from tidegate.report.page import Estimate, Intervals, Lines, Map, Maps, Numbers, Page, Single, Verdicts, Views

Figure: TypeAlias = dict[str, Any]
"""`data` and `layout` for plotly.js, without a width, which the page sets; `narrow` optionally overrides the layout on
narrow screens."""


def label(text: str) -> str:
    """Return text with plotly's tags, entities and templates escaped."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("%{", "%\u200b{")


def plot_numbers(values: Numbers) -> list[float | None]:
    """Return numbers rounded to seven significant digits; None if they are not finite."""
    return [None if (number := finite(value)) is None else float(f"{number:.7g}") for value in values]


def base_layout(*, height: int) -> dict[str, Any]:
    """Return the common layout of all charts."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 14, "t": 28, "b": 8, "pad": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "var(--sans)", "size": 12, "color": "var(--soft)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "namelength": -1,
            "font": {"family": "var(--sans)", "size": 12, "color": "var(--ink)"},
        },
        "showlegend": False,
    }


def axis(*, title: str = "", **options: Any) -> dict[str, Any]:
    """Return an axis with thin lines and automatic margins."""
    return {
        "title": {"text": label(title), "standoff": 8, "font": {"size": 12}},
        "automargin": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "showline": False,
        "zeroline": False,
        "ticks": "",
        **options,
    }


def horizontal_line(y: float) -> dict[str, Any]:
    """Return a horizontal line across the chart."""
    return _line(x0=0, x1=1, xref="paper", y0=y, y1=y, yref="y")


def vertical_line(x: float, *, dash: str = "solid") -> dict[str, Any]:
    """Return a vertical line across the chart."""
    return _line(x0=x, x1=x, xref="x", y0=0, y1=1, yref="paper", dash=dash)


def _line(*, dash: str = "solid", **place: Any) -> dict[str, Any]:
    return {"type": "line", "layer": "below", "line": {"color": "var(--soft)", "width": 1.2, "dash": dash}, **place}


SEQUENTIAL = tuple(f"var(--sequential-{stop})" for stop in range(5))
DIVERGING = tuple(f"var(--diverging-{stop})" for stop in range(5))

_COLORS = 7
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, kw_only=True, slots=True)
class Palette:
    """The colors of the groups of a page."""

    places: Mapping[str, int | None]
    """Index of each group in the order of colors; None for a baseline."""

    def __contains__(self, group: str) -> bool:
        return group in self.places

    def color(self, group: str) -> str:
        """Return a CSS variable, neutral for the baseline and unknown groups."""
        place = self.places.get(group)
        return "var(--control)" if place is None else f"var(--group-{place % _COLORS})"

    def dash(self, group: str, turn: int = 0) -> str:
        """Return the dash of a group's bold line number `turn`; groups of equal color have different dashes."""
        place = self.places.get(group) or 0
        return _DASHES[(place // _COLORS + turn) % len(_DASHES)]


def palette_of(page: Page) -> Palette:
    """Return colors in the order of the groups in verdicts, intervals and curves; the baseline is neutral."""
    panels: list[Single] = []
    for section in page.sections:
        for panel in section.panels:
            panels += [view.panel for view in panel.views] if isinstance(panel, Views) else [panel]
    # Verdicts list all variants in order; intervals may list only some.
    estimates = [item for panel in panels if isinstance(panel, Verdicts) for item in panel.items]
    estimates += [item for panel in panels if isinstance(panel, Intervals) for item in panel.items]
    groups = [series.group for panel in panels if isinstance(panel, Lines) for series in panel.series]
    controls = {item.label for item in estimates if item.verdict == "control"}
    names = dict.fromkeys([*(item.label for item in estimates), *groups])
    colored = [name for name in names if name not in controls]
    return Palette(places={**dict.fromkeys(controls), **{name: place for place, name in enumerate(colored)}})


_ROW = 46
"""Pixels per estimate: its text above, its interval below."""
_TALL_ROW = 64
"""The same if its numbers are below the interval."""
_HALF_BAND = 0.17
"""Half-width of the margin's band, as a share of a row."""
_LONGEST = 26
"""Characters of a name that fit beside its numbers on a phone."""


def intervals_figure(panel: Intervals, palette: Palette) -> Figure:
    """Return the figure of the panel; names and numbers are above the intervals, so it needs no side margin."""
    items, digits = panel.items, estimate_digits(panel.items)
    margin = panel.margin or 0.0
    numbers = [0.0, -margin, margin]
    for item in items:
        numbers += [number for number in map(finite, (item.value, item.low, item.high)) if number is not None]
    start, stop = min(numbers), max(numbers)
    pad = 0.04 * ((stop - start) or 1.0)
    words = [note for row, item in enumerate(items) for note in _interval_words(item, row, digits)]
    # On narrow screens numbers are below their interval.
    narrow = [note if note["xanchor"] == "left" else {**note, "yanchor": "top", "yshift": -5} for note in words]
    fill = {"fillcolor": "var(--band)", "line": {"width": 0}, "layer": "below"}
    # A piece of the band behind each interval, without the text between them.
    bands = [
        {"type": "rect", "x0": -margin, "x1": margin, "y0": row - _HALF_BAND, "y1": row + _HALF_BAND, **fill}
        for row in range(len(items))
        if margin
    ]
    return {
        "data": [_interval_trace(item, row, palette, digits) for row, item in enumerate(items)],
        "layout": {
            **base_layout(height=_ROW * len(items) + 60),
            "xaxis": axis(
                title=panel.x_label,
                range=[start - pad, stop + pad],
                fixedrange=True,
                showline=True,
                showgrid=False,
                ticks="outside",
                tickcolor="var(--line)",
            ),
            "yaxis": axis(range=[len(items) - 0.5, -0.75], visible=False, fixedrange=True),
            "shapes": [*bands, vertical_line(0.0)],
            "annotations": words,
            "hovermode": "closest",
            "dragmode": False,
            "margin": {"l": 14, "r": 14, "t": 4, "b": 8},
        },
        "narrow": {"height": _TALL_ROW * len(items) + 60, "annotations": narrow},
    }


def _interval_trace(item: Estimate, row: int, palette: Palette, digits: int) -> dict[str, Any]:
    color = palette.color(item.label)
    x = plot_numbers((item.low, item.value, item.high))
    return {
        "type": "scatter",
        "name": label(item.label),
        "x": x,
        "y": [row] * 3,
        "mode": "lines+markers",
        "line": {"color": color, "width": 2.4},
        "marker": {"color": color, "size": [1, 10, 1], "opacity": 1, "line": {"width": 0}},
        "hovertemplate": label(f"{item.label}: {typographic(estimate_text(item, digits))}") + "<extra></extra>",
    }


def _interval_words(item: Estimate, row: int, digits: int) -> list[dict[str, Any]]:
    name = item.label if len(item.label) <= _LONGEST else f"{item.label[: _LONGEST - 1]}…"
    numbers = typographic(estimate_text(item, digits)) or "no estimate"
    words = numbers if item.verdict is None else f"{numbers} · {item.verdict}"
    place = {"y": row, "yanchor": "bottom", "yshift": 8, "xref": "paper", "showarrow": False}
    ink = {"color": "var(--ink)", "size": 12.5}
    return [
        {"text": f"<b>{label(name)}</b>", "x": 0, "xanchor": "left", "font": ink, **place},
        {"text": label(words), "x": 1, "xanchor": "right", **place},
    ]


_COLUMNS_WITH_TEXT = 6
"""With more columns, cells are too narrow for their numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorScale:
    """The color scale of a panel."""

    low: float
    high: float
    stops: tuple[str, ...]
    digits: int

    def text(self, value: float) -> str:
        """Return a value of the scale as text."""
        return typographic(number_text(value, self.digits))


def color_scale(panel: Maps) -> ColorScale:
    """Return the color scale, with ends from the panel or its values; zero is the middle of a diverging scale.

    Without values it runs from 0 to 1; around a single value it extends by a half to each side.
    """
    cells = [finite(value) for map_ in panel.maps for row in map_.values for value in row]
    numbers = [cell for cell in cells if cell is not None]
    low = min(numbers, default=0.0) if panel.low is None else panel.low
    high = max(numbers, default=1.0) if panel.high is None else panel.high
    if panel.diverging:
        high = max(abs(low), abs(high))
        low = -high
    if low == high:
        low, high = low - 0.5, high + 0.5
    stops = DIVERGING if panel.diverging else SEQUENTIAL
    return ColorScale(low=low, high=high, stops=stops, digits=scale_digits(low, high))


def map_size(panel: Maps) -> Literal["small", "medium", "large"]:
    """Return the size of each map, by the columns of the widest."""
    columns = max((len(row) for map_ in panel.maps for row in map_.values), default=0)
    # Column names are wider than numbers.
    columns += 4 * bool(panel.column_names)
    return "small" if columns <= 4 else "medium" if columns <= 8 else "large"


def map_figures(panel: Maps) -> list[Figure]:
    """Return a figure for each map; rows run downwards."""
    scale = color_scale(panel)
    return [_map_figure(map_, panel, scale) for map_ in panel.maps]


def _map_figure(map_: Map, panel: Maps, scale: ColorScale) -> Figure:
    rows, columns = len(map_.values), max(map(len, map_.values), default=0)
    cell_height = 34 if rows <= 6 else 24 if rows <= 12 else 18
    return {
        "data": [_heatmap(map_, panel, scale, columns)],
        "layout": {
            **base_layout(height=cell_height * rows + 52),
            "xaxis": _index_axis(panel.column_label, columns, panel.column_names),
            "yaxis": {**_index_axis(panel.row_label, rows, panel.row_names), "autorange": "reversed"},
            "dragmode": False,
            "hovermode": "closest",
            "margin": {"l": 8, "r": 4, "t": 4, "b": 8},
        },
    }


def _heatmap(map_: Map, panel: Maps, scale: ColorScale, columns: int) -> dict[str, Any]:
    number = f"%{{z:.{scale.digits}f}}"
    # Names of rows and columns replace their numbers.
    row, column = ("%{customdata[0]}", "%{customdata[1]}") if panel.row_names else ("%{y}", "%{x}")
    place = f"{label(panel.row_label)} {row}, {label(panel.column_label)} {column}"
    names = [[[label(row), label(column)] for column in panel.column_names] for row in panel.row_names]
    last = len(scale.stops) - 1
    return {
        "type": "heatmap",
        "name": label(map_.label),
        "z": [plot_numbers(row) for row in map_.values],
        "zmin": scale.low,
        "zmax": scale.high,
        "colorscale": [[stop / last, color] for stop, color in enumerate(scale.stops)],
        "showscale": False,
        "xgap": 1.5,
        "ygap": 1.5,
        "hoverongaps": False,
        **({"customdata": names} if panel.row_names else {}),
        "hovertemplate": f"{place}<br>{label(panel.value_label)} <b>{number}</b><extra></extra>",
        **({"texttemplate": number, "textfont": {"size": 11}} if columns <= _COLUMNS_WITH_TEXT else {}),
    }


def _index_axis(title: str, count: int, names: tuple[str, ...]) -> dict[str, Any]:
    step = 1 if count <= 8 else 2 if count <= 16 else 4
    return axis(
        title=title,
        tickvals=list(range(0, count, step)),
        **({"ticktext": [label(name) for name in names[::step]]} if names else {}),
        ticklabelstandoff=3,
        showgrid=False,
        fixedrange=True,
    )
