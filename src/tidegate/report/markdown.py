"""The page in Markdown: the same words and tables; curves by their ends, maps and intervals as tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tidegate._json import finite
from tidegate._text import printable
from tidegate.report.formats import estimate_digits, estimate_text, heading, number_text
from tidegate.report.maps import colour_scale
from tidegate.report.page import (
    Checks,
    Column,
    Estimate,
    Intervals,
    Lines,
    Maps,
    Page,
    Panel,
    Prose,
    Series,
    Snippet,
    Table,
    Verdicts,
    Views,
)
from tidegate.report.tables import estimates_table, format_rows, map_table, numeric_columns
from tidegate.report.ticks import tick_text

_MARKS = {"holds": "✓ holds", "violated": "✗ **violated**", "warning": "⚠ warning", "note": "· note"}


def markdown_page(page: Page) -> str:
    """Render the page as GitHub's Markdown. Text is shown as it is, apart from `code` between backticks."""
    blocks = [f"# {_text(page.title)}", _text(page.summary)]
    for section in page.sections:
        blocks += [f"## {_text(section.title)}", _text(section.lead)]
        for panel in section.panels:
            blocks += _blocks(panel, level=3)
    if page.footer:
        blocks += ["---", _text(page.footer)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _blocks(panel: Panel, level: int) -> Iterator[str]:
    if isinstance(panel, Views):
        yield f"{'#' * level} {_text(panel.title)}"
        for view in panel.views:
            yield f"**{_text(view.label)}**"
            yield from _blocks(view.panel, level + 1)
        return
    title: str = getattr(panel, "title", "")
    if title:
        yield f"{'#' * level} {_text(title)}"
    yield from _WRITERS[panel.kind](panel)


def _verdicts(panel: Verdicts) -> Iterator[str]:
    digits = estimate_digits(panel.items)
    yield "\n".join(_verdict(item, digits, panel.unit) for item in panel.items)
    if panel.rule:
        yield f"*The rule.* {_text(panel.rule)}"


def _verdict(item: Estimate, digits: int, unit: str) -> str:
    verdict = f" — **{item.verdict}**" if item.verdict else ""
    sentence = f": {_text(item.sentence)}" if item.sentence else ""
    numbers = estimate_text(item, digits) if item.verdict != "control" else ""
    measured = f" ({_text(f'{numbers} {unit}')})" if numbers else ""
    return f"- **{_text(item.label)}**{verdict}{sentence}{measured}"


def _intervals(panel: Intervals) -> Iterator[str]:
    yield _text(panel.alternative)
    yield _markdown_table(
        estimates_table(panel.items, title=panel.title, unit=panel.x_label, digits=estimate_digits(panel.items))
    )
    if panel.margin is not None:
        yield f"A difference within ±{number_text(panel.margin)} does not matter."


def _table(panel: Table) -> Iterator[str]:
    yield _markdown_table(panel)
    yield _text(panel.note)


def _lines(panel: Lines) -> Iterator[str]:
    yield _text(panel.alternative)
    x, y = panel.x_label, panel.y_label
    rows = tuple(row for series in panel.series if not series.faint and (row := _ends(series)))
    columns = tuple(Column(title=title) for title in ("", f"first: {x}", y, f"last: {x}", y))
    if rows:
        yield _markdown_table(Table(title=panel.title, columns=columns, rows=rows))
    if panel.marker is not None:
        yield f"Marked at {number_text(panel.marker)}: {_text(panel.marker_label)}"


def _ends(series: Series) -> tuple[str, str, float, str, float] | None:
    points = [
        (x, y)
        for x, y in zip(map(finite, series.x), map(finite, series.y), strict=True)
        if x is not None and y is not None
    ]
    if not points:
        return None
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    return series.label, tick_text(first_x), first_y, tick_text(last_x), last_y


def _maps(panel: Maps) -> Iterator[str]:
    yield _text(panel.alternative)
    digits = colour_scale(panel).digits
    for map_ in panel.maps:
        yield f"**{_text(map_.label)}** — {_text(panel.value_label)}"
        yield _markdown_table(map_table(map_, panel, digits=digits))


def _checks(panel: Checks) -> Iterator[str]:
    yield "\n".join(f"- {_MARKS[item.state]}: **{_text(item.name)}** — {_text(item.detail)}" for item in panel.items)


def _prose(panel: Prose) -> Iterator[str]:
    for paragraph in panel.paragraphs:
        yield f"> **Caution.** {_text(paragraph)}" if panel.caution else _text(paragraph)


def _snippet(panel: Snippet) -> Iterator[str]:
    longest = max((len(run) for run in re.findall("`+", panel.text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}text\n{printable(panel.text.rstrip())}\n{fence}"


_WRITERS: dict[str, Callable[[Any], Iterator[str]]] = {
    "verdicts": _verdicts,
    "intervals": _intervals,
    "table": _table,
    "lines": _lines,
    "maps": _maps,
    "checks": _checks,
    "prose": _prose,
    "snippet": _snippet,
}


def _markdown_table(table: Table) -> str:
    numeric = numeric_columns(table)
    lines = [
        _row([_text(heading(column)) for column in table.columns]),
        _row(["---:" if is_number else ":---" for is_number in numeric]),
    ]
    for cells in format_rows(table):
        texts = [_text(cell.text) for cell in cells]
        lines.append(_row([f"**{text}**" if cell.best else text for text, cell in zip(texts, cells, strict=True)]))
    return "\n".join(lines)


def _row(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _text(text: str) -> str:
    """Text on one line, without the letters that Markdown or a terminal would read; code in backticks stays code."""
    pieces = re.split(r"(`[^`]+`)", printable(" ".join(text.split())))
    return "".join(_code(piece) if place % 2 else _escape(piece) for place, piece in enumerate(pieces))


def _code(piece: str) -> str:
    # In a table even code needs its bars escaped; outside one the backslash would show.
    return piece if "|" not in piece else _escape(piece)


def _escape(piece: str) -> str:
    piece = re.sub(r"([\\`*\[\]<>|$~])", r"\\\1", piece)
    piece = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", piece)
    piece = re.sub(r"&(?=#?\w+;)", r"\\&", piece)
    return re.sub(r"^(#|[+-](?= )|\d+(?=[.)] ))", _escape_start, piece)


def _escape_start(found: re.Match[str]) -> str:
    start = found.group()
    return f"{start[:-1]}{start[-1]}\\" if start[-1].isdigit() else f"\\{start}"
