"""The page in HTML: one file, with everything that it needs inside; and on disk, with its twins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tidegate._files import write_content
from tidegate._text import printable
from tidegate.report.colours import palette_of
from tidegate.report.embed import compress_text, embedded_json, json_text, script_hash
from tidegate.report.formats import estimate_digits, estimate_text, heading, slug, typographic
from tidegate.report.intervals import intervals_figure, whisker
from tidegate.report.lines import lines_figure
from tidegate.report.maps import colour_scale, map_figures, map_size
from tidegate.report.markdown import markdown_page
from tidegate.report.page import Check, Page, Section
from tidegate.report.tables import estimates_table, format_rows, map_table, numeric_columns

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2 import Environment

_PLAIN_DATA = 400_000
"""Data of more letters than this are compressed in the page."""


def html_page(page: Page) -> str:
    """Render the page as one HTML document that fetches nothing: its policy forbids it, and names the scripts."""
    scripts = {name: _part(f"{name}.js") for name in ("theme", "charts", "page")} | {"plotly": _plotly()}
    policy = " ".join(script_hash(scripts[name]) for name in ("theme", "plotly", "charts", "page"))
    sections: list[tuple[str, Section]] = []
    seen: Counter[str] = Counter()
    for section in page.sections:
        name = slug(section.title)
        seen[name] += 1
        sections.append((name if seen[name] == 1 else f"{name}-{seen[name]}", section))
    text = json_text(page.data)
    pack = len(text) > _PLAIN_DATA
    return (
        _environment()
        .get_template("page.html.j2", globals=_FUNCTIONS)
        .render(
            page=page,
            sections=sections,
            scripts=scripts,
            policy=policy,
            style=_part("style.css"),
            data=compress_text(text) if pack else embedded_json(page.data),
            data_encoding="gzip" if pack else "plain",
            palette=palette_of(page),
        )
    )


def write_page(page: Page, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `results.json` into a folder, and return the path of the first.

    The folder is made if it is missing. All three are rendered before any is written. Each is written beside its place
    and then moved there, so that nobody ever reads half a file.
    """
    texts = {
        "results.json": json_text(page.data) + "\n",
        "report.md": markdown_page(page),
        "report.html": html_page(page),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_content(folder / name, text.encode())
    return folder / "report.html"


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


def _tally(items: Sequence[Check]) -> list[tuple[str, int]]:
    """Return how many checks are in each state, the bad ones first."""
    counts = Counter(item.state for item in items)
    return [(state, counts[state]) for state in ("violated", "warning", "holds", "note") if counts[state]]


def _pieces(text: str) -> list[tuple[bool, str]]:
    """Split the text at backticks; each piece comes with whether it is code."""
    pieces = re.split(r"`([^`]+)`", text)
    return [(place % 2 == 1, piece) for place, piece in enumerate(pieces) if piece]


_FUNCTIONS = {
    function.__name__.removeprefix("_"): function
    for function in (
        colour_scale,
        embedded_json,
        estimate_digits,
        estimate_text,
        estimates_table,
        format_rows,
        heading,
        intervals_figure,
        lines_figure,
        map_figures,
        map_size,
        map_table,
        numeric_columns,
        _pieces,
        _tally,
        typographic,
        whisker,
    )
}
"""Functions that the templates call."""
