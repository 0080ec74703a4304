"""Tables as formatted cells, with their numbers and the best ones marked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate._json import finite
from tidegate.report.formats import cell_text
from tidegate.report.page import CellValue, Column, Map, Maps, Table

_STARTS_WITH_NUMBER = re.compile(r"[+\-\u2212±~≈<>≤≥ ]*\.?\d")


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
            Cell(text=cell_text(value, column), number=_number(value), best=_number(value) is not None and value == top)
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
