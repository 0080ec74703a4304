"""Common parts of all charts: layout, axes, lines, and one color for each group of a page.

Figures are JSON objects for plotly.js. Colors are CSS variables of `style.css`, resolved when the page is drawn in its
light or dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate._json import finite
from tidegate.report.page import Intervals, Lines, Numbers, Page, Single, Verdicts, Views

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
