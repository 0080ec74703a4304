"""Panels as plotly figures: plain JSON objects, whose colours are CSS variables that the page resolves."""

from __future__ import annotations

from typing import Any, TypeAlias

from tidegate._json import finite
from tidegate.report.page import Numbers

Figure: TypeAlias = dict[str, Any]
"""`data` and `layout`, as plotly.js takes them, without a width: the page gives each chart its own.

`narrow`, where it is there, holds what of the layout is different on a phone.
"""


def label(text: str) -> str:
    """Return text for plotly, which would read tags, entities and templates in it."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("%{", "%\u200b{")


def plot_numbers(values: Numbers) -> list[float | None]:
    """Return numbers to the seven digits that a chart can show; None where there is none."""
    return [None if (number := finite(value)) is None else float(f"{number:.7g}") for value in values]


def base_layout(*, height: int) -> dict[str, Any]:
    """Return the layout that all charts share."""
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
    """Return a quiet axis: hairlines, its labels inside the chart's own width."""
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
    """Return a line across the chart."""
    return _line(x0=0, x1=1, xref="paper", y0=y, y1=y, yref="y")


def vertical_line(x: float, *, dash: str = "solid") -> dict[str, Any]:
    """Return a line from bottom to top."""
    return _line(x0=x, x1=x, xref="x", y0=0, y1=1, yref="paper", dash=dash)


def _line(*, dash: str = "solid", **place: Any) -> dict[str, Any]:
    return {
        "type": "line",
        "layer": "below",
        "line": {"color": "var(--soft)", "width": 1.2, "dash": dash},
        **place,
    }
