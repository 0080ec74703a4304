"""Heatmaps as small multiples on one color scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tidegate._json import finite
from tidegate.report.charts import DIVERGING, SEQUENTIAL, Figure, axis, base_layout, label, plot_numbers
from tidegate.report.formats import number_text, scale_digits, typographic
from tidegate.report.page import Map, Maps

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
    return [_figure(map_, panel, scale) for map_ in panel.maps]


def _figure(map_: Map, panel: Maps, scale: ColorScale) -> Figure:
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
