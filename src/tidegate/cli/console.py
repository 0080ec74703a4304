"""Console output; text from models and files cannot control the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tidegate._text import printable


def new_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text literally: no markup, and control characters escaped."""
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a result as JSON, with null for nan and infinities."""
    from tidegate._json import without_nan

    sys.stdout.write(json.dumps(without_nan(value), allow_nan=False, indent=2) + "\n")


def new_table(title: str | None = None, *, show_header: bool = True) -> Table:
    """Return an empty table in the common style."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        show_header=show_header,
    )


def finish_page(path: Path, data: Any, *, as_json: bool, result: RenderableType | None = None) -> None:
    """Print the result and the path of its page, or both as JSON."""
    if as_json:
        print_json({"page": str(path), "results": data})
        return
    console = new_console()
    if result is not None:
        console.print(result, soft_wrap=isinstance(result, str))
    console.print(f"Page: {path}", soft_wrap=True)


@final
class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before the text is measured, so that columns are wide enough."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all other text, except rich's own control segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
