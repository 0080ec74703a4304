"""Formatting of numbers, names and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate._json import finite
from tidegate.report.page import CellValue, Column, Estimate, Map, Maps, Table

_MOST_DIGITS = 6
_STARTS_WITH_NUMBER = re.compile(r"[+\-\u2212±~≈<>≤≥ ]*\.?\d")


def number_text(value: float | None, digits: int | None = None, *, signed: bool = False) -> str:
    """Return a number with thousands separators and a given number of decimals; empty if it is None or not finite.

    Without digits, integers have no decimals and other numbers four significant digits. Zero has no sign.
    """
    value = finite(value)
    if value is None:
        return ""
    if digits is None:
        text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
    else:
        text = f"{value:,.{digits}f}"
    if not re.search("[1-9]", text):
        return text.removeprefix("-")
    return f"+{text}" if signed and value > 0 else text


def heading(column: Column) -> str:
    """Return a column's title with its unit."""
    return f"{column.title} ({column.unit})" if column.unit else column.title


def estimate_digits(items: Iterable[Estimate]) -> int:
    """Return decimals for two significant digits of the narrowest half-width, or three of the smallest value."""
    items = list(items)
    widths = [(item.high - item.low) / 2 for item in items if item.low is not None and item.high is not None]
    if widths := [width for width in widths if math.isfinite(width) and width > 0]:
        return _decimals(min(widths), significant=2)
    values = [abs(value) for item in items if (value := finite(item.value))]
    return _decimals(min(values), significant=3) if values else 0


def estimate_text(item: Estimate, digits: int) -> str:
    """Return an estimate and its interval as `-0.012 [-0.020, -0.004]`; empty without a value."""
    value = number_text(item.value, digits, signed=True)
    low, high = number_text(item.low, digits, signed=True), number_text(item.high, digits, signed=True)
    return f"{value} [{low}, {high}]" if value and low and high else value


def scale_digits(low: float, high: float) -> int:
    """Return decimals that distinguish about a hundred values of a scale."""
    span = high - low
    return min(max(2 - math.ceil(math.log10(span)), 0), _MOST_DIGITS) if span > 0 else 2


def typographic(text: str) -> str:
    """Return the text with a minus sign for each hyphen that starts a number."""
    return re.sub(r"(?<![\w-])-(?=[\d.])", "\u2212", text)


def slug(title: str) -> str:
    """Return a title as an element id of letters, digits and hyphens; other ids have underscores."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"


def _decimals(value: float, *, significant: int) -> int:
    return min(max(significant - 1 - math.floor(math.log10(value)), 0), _MOST_DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A formatted cell."""

    text: str
    number: float | None
    """None for text and empty cells."""
    best: bool


def format_rows(table: Table) -> list[list[Cell]]:
    """Return the formatted cells of the table's rows."""
    best = [_best(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]
    return [
        [
            Cell(
                text=value if isinstance(value, str) else number_text(value, column.digits, signed=column.signed),
                number=_number(value),
                best=_number(value) is not None and value == top,
            )
            for value, column, top in zip(row, table.columns, best, strict=True)
        ]
        for row in table.rows
    ]


def numeric_columns(table: Table) -> list[bool]:
    """Return for each column whether all of its filled cells start with a number, as in `1.25 ± 0.01`."""
    filled = [[row[place] for row in table.rows if row[place] not in (None, "")] for place in range(len(table.columns))]
    return [
        bool(values) and all(not isinstance(v, str) or _STARTS_WITH_NUMBER.match(v) for v in values)
        for values in filled
    ]


def map_table(map_: Map, panel: Maps, *, digits: int) -> Table:
    """Return a map as a table, with named rows and columns, or counted from 0."""
    width = max(map(len, map_.values), default=0)
    names = panel.column_names or tuple(map(str, range(width)))
    columns = [Column(title=f"{panel.column_label} {name}", digits=digits) for name in names[:width]]
    rows = tuple(
        (
            f"{panel.row_label} {panel.row_names[place] if panel.row_names else place}",
            *row,
            *[None] * (width - len(row)),
        )
        for place, row in enumerate(map_.values)
    )
    return Table(title=map_.label, columns=(Column(title=""), *columns), rows=rows)


def _number(value: CellValue) -> float | None:
    return None if isinstance(value, str) else finite(value)


def _best(column: Column, values: list[CellValue]) -> float | None:
    """Return the best number, if at least two differ."""
    numbers = [number for value in values if (number := _number(value)) is not None]
    if column.better is None or len(set(numbers)) < 2:
        return None
    return min(numbers) if column.better == "low" else max(numbers)
