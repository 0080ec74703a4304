"""What all charts share: layout, axes, lines, and one color for each group of a page.

Figures are plain JSON objects as plotly.js takes them. Colors are CSS variables of `style.css`, which the page looks up
when it draws, in light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate._json import finite
from tidegate.report.page import Intervals, Lines, Numbers, Page, Single, Verdicts, Views

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


SEQUENTIAL = tuple(f"var(--sequential-{stop})" for stop in range(5))
DIVERGING = tuple(f"var(--diverging-{stop})" for stop in range(5))

_COLOURS = 7
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, kw_only=True, slots=True)
class Palette:
    """The colours of a page's groups."""

    places: Mapping[str, int | None]
    """For each group its place in the order of colours; None for a control."""

    def __contains__(self, group: str) -> bool:
        return group in self.places

    def colour(self, group: str) -> str:
        """Return a CSS variable; neutral ink for the control and for what is no group of the page."""
        place = self.places.get(group)
        return "var(--control)" if place is None else f"var(--group-{place % _COLOURS})"

    def dash(self, group: str, turn: int = 0) -> str:
        """Return the dash of a group's bold line number `turn`; colours that are used again come with another dash."""
        place = self.places.get(group) or 0
        return _DASHES[(place // _COLOURS + turn) % len(_DASHES)]


def palette_of(page: Page) -> Palette:
    """Return colours in the order in which verdicts and curves name their groups; a verdict's control has none."""
    panels: list[Single] = []
    for section in page.sections:
        for panel in section.panels:
            panels += [view.panel for view in panel.views] if isinstance(panel, Views) else [panel]
    # Verdicts name the variants in the page's order; other intervals may show a few of them.
    estimates = [item for panel in panels if isinstance(panel, Verdicts) for item in panel.items]
    estimates += [item for panel in panels if isinstance(panel, Intervals) for item in panel.items]
    groups = [series.group for panel in panels if isinstance(panel, Lines) for series in panel.series]
    controls = {item.label for item in estimates if item.verdict == "control"}
    names = dict.fromkeys([*(item.label for item in estimates), *groups])
    coloured = [name for name in names if name not in controls]
    return Palette(places={**dict.fromkeys(controls), **{name: place for place, name in enumerate(coloured)}})
