"""The page in Markdown: the same text and tables, and the text alternatives of charts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidegate._text import printable
from tidegate.report.formats import estimate_digits, estimate_text, format_rows, heading, numeric_columns
from tidegate.report.page import Checks, Estimate, Page, Panel, Prose, Snippet, Table, Verdicts, Views

_MARKS = {"holds": "✓ holds", "violated": "✗ **violated**", "warning": "⚠ warning", "note": "· note"}


def markdown_page(page: Page) -> str:
    """Return the page in GitHub Markdown. Text is escaped, except `code` between backticks."""
    blocks = [f"# {_text(page.title)}", _text(page.summary)]
    for section in page.sections:
        blocks += [f"## {_text(section.title)}", _text(section.lead)]
        for panel in section.panels:
            blocks += _blocks(panel, level=3)
    if page.footer:
        blocks += ["---", _text(page.footer)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _blocks(panel: Panel, level: int) -> Iterator[str]:
    if not isinstance(panel, Verdicts | Checks | Prose):
        yield f"{'#' * level} {_text(panel.title)}"
    match panel:
        case Views():
            for view in panel.views:
                yield f"**{_text(view.label)}**"
                yield from _blocks(view.panel, level + 1)
        case Verdicts():
            digits = estimate_digits(panel.items)
            yield "\n".join(_verdict(item, digits, panel.unit) for item in panel.items)
            yield f"*Rule.* {_text(panel.rule)}" if panel.rule else ""
        case Table():
            yield _table(panel)
            yield _text(panel.note)
        case Checks():
            marked = ((_MARKS[item.state], _text(item.name), _text(item.detail)) for item in panel.items)
            yield "\n".join(f"- {mark}: **{name}** — {detail}" for mark, name, detail in marked)
        case Prose():
            for paragraph in panel.paragraphs:
                yield f"> **Caution.** {_text(paragraph)}" if panel.caution else _text(paragraph)
        case Snippet():
            longest = max((len(run) for run in re.findall("`+", panel.text)), default=0)
            fence = "`" * max(3, longest + 1)
            yield f"{fence}text\n{printable(panel.text.rstrip())}\n{fence}"
        case _:
            yield _text(panel.alternative)


def _verdict(item: Estimate, digits: int, unit: str) -> str:
    verdict = f" — **{item.verdict}**" if item.verdict else ""
    sentence = f": {_text(item.sentence)}" if item.sentence else ""
    numbers = estimate_text(item, digits) if item.verdict != "control" else ""
    measured = f" ({_text(f'{numbers} {unit}')})" if numbers else ""
    return f"- **{_text(item.label)}**{verdict}{sentence}{measured}"


def _table(table: Table) -> str:
    numeric = numeric_columns(table)
    rows = [
        [_text(heading(column)) for column in table.columns],
        ["---:" if is_number else ":---" for is_number in numeric],
    ]
    for cells in format_rows(table):
        texts = [_text(cell.text) for cell in cells]
        rows.append([f"**{text}**" if cell.best else text for text, cell in zip(texts, cells, strict=True)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(text: str) -> str:
    """Return text on one line, with Markdown and terminal control characters escaped, except in code."""
    pieces = re.split(r"(`[^`]+`)", printable(" ".join(text.split())))
    # In tables, bars are escaped even in code.
    is_code = (place % 2 == 1 and "|" not in piece for place, piece in enumerate(pieces))
    return "".join(piece if code else _escape(piece) for piece, code in zip(pieces, is_code, strict=True))


def _escape(piece: str) -> str:
    piece = re.sub(r"([\\`*\[\]<>|$~])", r"\\\1", piece)
    piece = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", piece)
    piece = re.sub(r"&(?=#?\w+;)", r"\\&", piece)
    # Headings and lists.
    piece = re.sub(r"^(#|[+-](?= ))", r"\\\1", piece)
    return re.sub(r"^(\d+)(?=[.)] )", r"\1\\", piece)
