"""The page as a self-contained HTML file, written with its Markdown and JSON versions."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tidegate._files import write_content
from tidegate._json import without_nan
from tidegate._text import printable
from tidegate.report.charts import color_scale, intervals_figure, map_figures, map_size, palette_of
from tidegate.report.formats import (
    estimate_digits,
    estimate_text,
    format_rows,
    heading,
    map_table,
    numeric_columns,
    slug,
    typographic,
)
from tidegate.report.lines import lines_figure
from tidegate.report.markdown import markdown_page
from tidegate.report.page import Check, Page, Section

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2 import Environment

_PLAIN_DATA = 400_000
"""Longer data is compressed in the page."""


def html_page(page: Page) -> str:
    """Return the page as one HTML document. Its Content-Security-Policy forbids requests and other scripts."""
    own = ("theme", "charts", "page")
    scripts = {name: read_template("tidegate.report", f"{name}.js") for name in own} | {"plotly": _plotly()}
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
        template_environment("tidegate.report")
        .get_template("page.html.j2", globals=_FUNCTIONS)
        .render(
            page=page,
            sections=sections,
            scripts=scripts,
            policy=policy,
            style=read_template("tidegate.report", "style.css"),
            data=compress_text(text) if pack else embedded_json(page.data),
            data_encoding="gzip" if pack else "plain",
            palette=palette_of(page),
        )
    )


def write_page(page: Page, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `results.json` into a folder, and return the path of the first.

    The folder is created if it is missing. All files are rendered before any is written, and each replaces the old one
    atomically.
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


def json_text(value: Any) -> str:
    """Return a JSON value as text; nan and infinities become null."""
    return printable(json.dumps(without_nan(value), allow_nan=False, ensure_ascii=False, indent=1))


def embedded_json(value: Any) -> str:
    """Return a JSON value as text for a script element, with HTML characters escaped."""
    text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def compress_text(text: str) -> str:
    """Return text compressed by gzip in base64; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def script_hash(source: str) -> str:
    """Return a script's hash for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


@cache
def template_environment(package: str) -> Environment:
    """Return the jinja environment of a package's templates, with escaping on."""
    # Imported late, like plotly below: worker processes build pages without rendering them.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: Any) -> Any:
    """Escape control characters of plain text; markup, such as the scripts, stays unchanged."""
    return printable(value) if type(value) is str else value


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    source: Any = get_plotlyjs()
    return str(source).replace("\r\n", "\n")


def read_template(package: str, name: str) -> str:
    """Return the text of a file in a package's folder of templates."""
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")


def _tally(items: Sequence[Check]) -> list[tuple[str, int]]:
    """Return the number of checks in each state, violations first."""
    counts = Counter(item.state for item in items)
    return [(state, counts[state]) for state in ("violated", "warning", "holds", "note") if counts[state]]


def _pieces(text: str) -> list[tuple[bool, str]]:
    """Split text at backticks, into pairs of whether a piece is code and its text."""
    pieces = re.split(r"`([^`]+)`", text)
    return [(place % 2 == 1, piece) for place, piece in enumerate(pieces) if piece]


_FUNCTIONS = {
    function.__name__.removeprefix("_"): function
    for function in (
        color_scale,
        embedded_json,
        estimate_digits,
        estimate_text,
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
    )
}
"""Functions for the templates."""
