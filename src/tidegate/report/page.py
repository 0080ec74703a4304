"""The contents of a page as data: sections of panels.

Callers build panels; the other modules of `tidegate.report` only render them.
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
"""None is a gap in a curve or an empty cell of a map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval."""

    label: str
    value: float | None
    """None if there is no estimate."""
    low: float | None = None
    high: float | None = None
    verdict: VerdictWord | None = None
    sentence: str = ""
    """The result in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """One line for each variant, and the rule of the verdicts."""

    items: tuple[Estimate, ...]
    rule: str
    unit: str = ""
    """Of the estimates."""
    kind: Literal["verdicts"] = "verdicts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """A forest plot: estimates with their intervals, one below another, and a line at zero."""

    title: str
    alternative: str
    """Text alternative of the chart."""
    x_label: str
    items: tuple[Estimate, ...]
    margin: float | None = None
    """Half-width of the band of irrelevant differences around zero."""
    kind: Literal["intervals"] = "intervals"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    unit: str = ""
    digits: int | None = None
    """Decimals of its numbers; None formats integers with separators and other numbers with four digits."""
    signed: bool = False
    """Whether positive numbers have a plus sign."""
    help: str = ""
    better: Literal["low", "high"] | None = None
    """Whether low or high numbers are better, if either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A sortable table of numbers and text."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[CellValue, ...], ...]
    note: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart. A group has the same color on the whole page."""

    label: str
    group: str
    x: Numbers
    y: Numbers
    faint: bool = False
    """Whether it is one of several lines that a bold line summarizes; thin lines are not in the legend."""
    low: Numbers | None = None
    high: Numbers | None = None
    """Ends of a band around the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """A line chart."""

    title: str
    alternative: str
    x_label: str
    y_label: str
    """Labels end with the unit."""
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    zero_line: bool = False
    """Whether to draw a line at zero, for differences."""
    marker: float | None = None
    """Position of a vertical line."""
    marker_label: str = ""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One matrix of numbers."""

    label: str
    values: tuple[Numbers, ...]
    """By row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Heatmaps on one color scale, such as layer × head for each variant."""

    title: str
    alternative: str
    row_label: str
    column_label: str
    value_label: str
    maps: tuple[Map, ...]
    row_names: tuple[str, ...] = ()
    column_names: tuple[str, ...] = ()
    """Names of rows and columns; if empty, they are counted from 0."""
    low: float | None = None
    high: float | None = None
    """Ends of the color scale; None takes them from the values."""
    diverging: bool = False
    """Whether zero is the middle of the color scale."""
    kind: Literal["maps"] = "maps"


def layer_head_maps(
    title: str, name: str, maps: Mapping[str, Sequence[Numbers]], *, when: str = "", from_zero: bool = True
) -> Maps:
    """Return heatmaps of one quantity by layer and head, one per label; missing heads are empty cells.

    `maps` has for each label rows by layer with a number for each head. `when` is a suffix of the description, as in ",
    at the end of training". `from_zero` starts the color scale at 0.
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
    """Return the mean of the finite numbers; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def format_number(value: float | None) -> str:
    """Return a number with three digits, for a sentence."""
    return "nothing" if value is None else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One condition of a fair experiment, and its state."""

    name: str
    state: CheckState
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """A list of conditions; violated ones are red."""

    items: tuple[Check, ...]
    kind: Literal["checks"] = "checks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prose:
    """Paragraphs."""

    paragraphs: tuple[str, ...]
    caution: bool = False
    """Whether it is a warning."""
    kind: Literal["prose"] = "prose"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """Preformatted text to copy: a command, versions, a configuration."""

    title: str
    text: str
    kind: Literal["snippet"] = "snippet"


Single: TypeAlias = Verdicts | Intervals | Table | Lines | Maps | Checks | Prose | Snippet


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One of several tabs."""

    label: str
    panel: Single


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """Tabs: one panel is visible at a time, initially the first; print shows all."""

    title: str
    views: tuple[View, ...]
    kind: Literal["views"] = "views"


Panel: TypeAlias = Single | Views


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and its panels."""

    title: str
    panels: tuple[Panel, ...]
    lead: str = ""
    """A sentence or two of introduction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole page."""

    title: str
    summary: str
    """One paragraph: the answer and the experiment."""
    sections: tuple[Section, ...]
    data: dict[str, Any]
    """The data of the page as JSON, written to `results.json` and available for download on the page."""
    footer: str = ""
