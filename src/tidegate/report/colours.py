"""Which colour a group has: one for the whole page, the control in neutral ink.

Colours are named here, as the CSS variables of `style.css`; the page looks them up when it draws, in light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidegate.report.page import Estimate, Intervals, Lines, Page, Single, Verdicts, Views

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
        """A CSS variable; neutral ink for the control and for what is no group of the page."""
        place = self.places.get(group)
        return "var(--control)" if place is None else f"var(--group-{place % _COLOURS})"

    def dash(self, group: str, turn: int = 0) -> str:
        """The dash of a group's bold line number `turn`; colours that are used again come with another dash."""
        place = self.places.get(group) or 0
        return _DASHES[(place // _COLOURS + turn) % len(_DASHES)]


def palette_of(page: Page) -> Palette:
    """Colours in the order in which verdicts and curves name their groups; what a verdict calls control has none."""
    controls = {item.label for item in _estimates(page) if item.verdict == "control"}
    names = dict.fromkeys([*(item.label for item in _estimates(page)), *_groups(page)])
    coloured = [name for name in names if name not in controls]
    return Palette(places={**dict.fromkeys(controls), **{name: place for place, name in enumerate(coloured)}})


def _estimates(page: Page) -> Iterator[Estimate]:
    # Verdicts name the variants in the page's order; other intervals may show a few of them.
    for kind in (Verdicts, Intervals):
        for panel in _singles(page):
            if isinstance(panel, kind):
                yield from panel.items


def _groups(page: Page) -> Iterator[str]:
    for panel in _singles(page):
        if isinstance(panel, Lines):
            yield from (series.group for series in panel.series)


def _singles(page: Page) -> Iterator[Single]:
    for section in page.sections:
        for panel in section.panels:
            if isinstance(panel, Views):
                yield from (view.panel for view in panel.views)
            else:
                yield panel
