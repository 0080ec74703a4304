"""Which colour a group has: one for the whole page, the control in neutral ink.

Colours are named here, as the CSS variables of `style.css`; the page looks them up when it draws, in light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.report.page import Intervals, Lines, Page, Single, Verdicts, Views

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
