"""The page in HTML: one file, with everything that it needs inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tidegate._text import printable
from tidegate.report.colours import palette_of
from tidegate.report.embed import compress_text, embedded_json, json_text, script_hash
from tidegate.report.formats import estimate_digits, estimate_text, heading, slug, typographic
from tidegate.report.intervals import intervals_figure, whisker
from tidegate.report.lines import lines_figure
from tidegate.report.maps import colour_scale, map_figures, map_size
from tidegate.report.page import Check, Page, Section
from tidegate.report.tables import estimates_table, format_rows, map_table, numeric_columns

if TYPE_CHECKING:
    from jinja2 import Environment

_PLAIN_DATA = 400_000
"""Data of more letters than this are compressed in the page."""


def html_page(page: Page) -> str:
    """Render the page as one HTML document that fetches nothing: its policy forbids it, and names the scripts."""
    scripts = {
        "theme": _part("theme.js"),
        "plotly": _plotly(),
        "charts": _part("charts.js"),
        "page": _part("page.js"),
    }
    text = json_text(page.data)
    pack = len(text) > _PLAIN_DATA
    return (
        _environment()
        .get_template("page.html.j2", globals=_FUNCTIONS)
        .render(
            page=page,
            sections=_name_sections(page.sections),
            scripts=scripts,
            policy=" ".join(script_hash(source) for source in scripts.values()),
            style=_part("style.css"),
            data=compress_text(text) if pack else embedded_json(page.data),
            data_encoding="gzip" if pack else "plain",
            palette=palette_of(page),
        )
    )


@cache
def _environment() -> Environment:
    # Import late, here and below: worker processes build pages without drawing them.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("tidegate.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: Any) -> Any:
    """Spell what would steer a terminal, or turn text around; markup, such as the scripts, stays as it is."""
    return printable(value) if type(value) is str else value


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    source: Any = get_plotlyjs()
    return str(source).replace("\r\n", "\n")


def _part(name: str) -> str:
    return resources.files("tidegate.report").joinpath("templates", name).read_text(encoding="utf-8")


def _name_sections(sections: Sequence[Section]) -> list[tuple[str, Section]]:
    """Give each section a name for its anchor, unique in the page."""
    seen: Counter[str] = Counter()
    named: list[tuple[str, Section]] = []
    for section in sections:
        name = slug(section.title)
        seen[name] += 1
        named.append((name if seen[name] == 1 else f"{name}-{seen[name]}", section))
    return named


def _tally(items: Sequence[Check]) -> list[tuple[str, int]]:
    """How many checks are in each state, the bad ones first."""
    counts = Counter(item.state for item in items)
    return [(state, counts[state]) for state in ("violated", "warning", "holds", "note") if counts[state]]


def _pieces(text: str) -> list[tuple[bool, str]]:
    """Split the text at backticks; each piece comes with whether it is code."""
    pieces = re.split(r"`([^`]+)`", text)
    return [(place % 2 == 1, piece) for place, piece in enumerate(pieces) if piece]


_FUNCTIONS: dict[str, Any] = {
    "colour_scale": colour_scale,
    "embedded_json": embedded_json,
    "estimate_digits": estimate_digits,
    "estimate_text": estimate_text,
    "estimates_table": estimates_table,
    "heading": heading,
    "intervals_figure": intervals_figure,
    "lines_figure": lines_figure,
    "map_figures": map_figures,
    "map_size": map_size,
    "map_table": map_table,
    "numeric_columns": numeric_columns,
    "pieces": _pieces,
    "tally": _tally,
    "typographic": typographic,
    "whisker": whisker,
    "format_rows": format_rows,
}
"""Functions that the templates call."""
