"""The page in HTML: one file, with everything that it needs inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tidegate.report.colours import palette_of
from tidegate.report.embed import embedded_json, json_text, packed, script_hash
from tidegate.report.formats import estimate_digits, estimate_text, heading, slug, typographic
from tidegate.report.intervals import intervals_figure, whisker
from tidegate.report.lines import lines_figure
from tidegate.report.maps import colour_scale, map_figures, map_size
from tidegate.report.page import Check, Page, Section
from tidegate.report.tables import estimates_table, map_table, numeric_columns, written_rows

if TYPE_CHECKING:
    from jinja2 import Environment

_PLAIN_DATA = 400_000
"""Letters of data up to which they stand in the page as they are; more are compressed, so that the page stays small."""


def html_page(page: Page) -> str:
    """The page as one HTML document that fetches nothing: its policy forbids it, and names each script that may run."""
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
            sections=_named(page.sections),
            scripts=scripts,
            policy=" ".join(script_hash(source) for source in scripts.values()),
            style=_part("style.css"),
            data=packed(text) if pack else embedded_json(page.data),
            data_encoding="gzip" if pack else "plain",
            palette=palette_of(page),
        )
    )


@cache
def _environment() -> Environment:
    # Here and below imported late: whoever only describes a page, as worker processes do, need not load what draws it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("tidegate.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    source: Any = get_plotlyjs()
    return str(source).replace("\r\n", "\n")


def _part(name: str) -> str:
    return resources.files("tidegate.report").joinpath("templates", name).read_text(encoding="utf-8")


def _named(sections: Sequence[Section]) -> list[tuple[str, Section]]:
    """Sections with names for their places, each of them once."""
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
    """The text in pieces, each with whether it is code: what stands between backticks."""
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
    "written_rows": written_rows,
}
"""What the templates call."""
