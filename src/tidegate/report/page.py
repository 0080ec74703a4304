"""What a page shows, as data: every page is a list of these.

Whoever has something to show builds panels; `tidegate.report` draws them and knows nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

from tidegate._verdict import VerdictWord

CheckState: TypeAlias = Literal["holds", "violated", "warning", "note"]
CellValue: TypeAlias = float | str | None
Numbers: TypeAlias = tuple[float | None, ...]
"""None where there is no number: a gap in a curve, an empty cell of a map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval."""

    label: str
    value: float | None
    """None where nothing could be estimated."""
    low: float | None = None
    high: float | None = None
    verdict: VerdictWord | None = None
    sentence: str = ""
    """What it means, in words a reader can quote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """One line for each variant, and the rule by which it was judged."""

    items: tuple[Estimate, ...]
    rule: str
    unit: str = ""
    """Of the estimates."""
    kind: Literal["verdicts"] = "verdicts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Estimates with their intervals, one below another, around a line at zero."""

    title: str
    alternative: str
    """The picture in words, for who cannot see it."""
    x_label: str
    items: tuple[Estimate, ...]
    margin: float | None = None
    """Half the width of the band around zero inside which a difference does not matter."""
    kind: Literal["intervals"] = "intervals"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    unit: str = ""
    digits: int | None = None
    """Decimals of its numbers; None writes whole numbers with separators, and text as it is."""
    signed: bool = False
    """Whether positive numbers carry a plus."""
    help: str = ""
    better: Literal["low", "high"] | None = None
    """Which end is the good one, if either is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of numbers and words, to be sorted and copied."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[CellValue, ...], ...]
    note: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart. Series of one group have one colour, the same all over a page."""

    label: str
    group: str
    x: Numbers
    y: Numbers
    faint: bool = False
    """Whether it is one of several that a bold line sums up; it is left out of the legend."""
    low: Numbers | None = None
    high: Numbers | None = None
    """A band around the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Curves over one axis."""

    title: str
    """What to see in it."""
    alternative: str
    x_label: str
    y_label: str
    """Labels end in the unit."""
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    zero_line: bool = False
    """Whether a line at zero is drawn: for differences."""
    marker: float | None = None
    """An x at which something changes, drawn as a vertical line."""
    marker_label: str = ""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One matrix of numbers."""

    label: str
    values: tuple[Numbers, ...]
    """Row by row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Matrices side by side on one colour scale, such as layer × head for each variant."""

    title: str
    alternative: str
    row_label: str
    column_label: str
    value_label: str
    maps: tuple[Map, ...]
    row_names: tuple[str, ...] = ()
    column_names: tuple[str, ...] = ()
    """What rows and columns are called; if empty they are counted from 0."""
    low: float | None = None
    high: float | None = None
    """Ends of the colour scale; None takes them from the numbers."""
    diverging: bool = False
    """Whether zero is the middle of the scale."""
    kind: Literal["maps"] = "maps"


def layer_head_maps(
    title: str, name: str, maps: Mapping[str, Sequence[Numbers]], *, when: str = "", from_zero: bool = True
) -> Maps:
    """Return maps of one quantity by layer and head, one for each label; cells are empty where a layer has fewer heads.

    Args:
        title: Of the panel.
        name: Of the quantity.
        maps: Rows by layer, a number for each head.
        when: Added to the description, as in ", at the end of the training".
        from_zero: Whether 0 is the lower end of the colour scale.
    """
    width = {label: max(map(len, rows)) for label, rows in maps.items()}
    means = "; ".join(
        f"{label}: " + ", ".join(f"layer {place} {format_number(mean_of_known(row))}" for place, row in enumerate(rows))
        for label, rows in maps.items()
    )
    return Maps(
        title=title,
        alternative=f"{name} by layer and head{when}. Means of layers: {means}.",
        row_label="layer",
        column_label="head",
        value_label=name,
        maps=tuple(
            Map(label=label, values=tuple((*row, *[None] * (width[label] - len(row))) for row in rows))
            for label, rows in maps.items()
        ),
        low=0.0 if from_zero else None,
    )


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers that are there and finite; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def format_number(value: float | None) -> str:
    """Format a number with three digits, for a sentence."""
    return "nothing" if value is None else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One condition of a fair experiment, and whether it was met."""

    name: str
    state: CheckState
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """Conditions, red where one is violated."""

    items: tuple[Check, ...]
    kind: Literal["checks"] = "checks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prose:
    """Paragraphs."""

    paragraphs: tuple[str, ...]
    caution: bool = False
    """Whether it warns."""
    kind: Literal["prose"] = "prose"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """Something to copy: a command, versions, a configuration."""

    title: str
    text: str
    kind: Literal["snippet"] = "snippet"


Single: TypeAlias = Verdicts | Intervals | Table | Lines | Maps | Checks | Prose | Snippet


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One of several ways to look at a thing."""

    label: str
    panel: Single


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """Panels of which one is shown at a time; the first at the start, all of them on paper."""

    title: str
    views: tuple[View, ...]
    kind: Literal["views"] = "views"


Panel: TypeAlias = Single | Views


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading, and what stands under it."""

    title: str
    panels: tuple[Panel, ...]
    lead: str = ""
    """A sentence or two that say what is to be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole page, top to bottom."""

    title: str
    summary: str
    """One paragraph: what was done."""
    sections: tuple[Section, ...]
    data: dict[str, Any]
    """What the page was made from, as JSON: it is written to `results.json` and can be saved from the page."""
    footer: str = ""
