"""A page and its twins on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tidegate.report.embed import json_text
from tidegate.report.html import html_page
from tidegate.report.markdown import markdown_page
from tidegate.report.page import Page


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
        _replace(folder / name, text)
    return folder / "report.html"


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes files that only their owner may read; a page is made to be handed on.
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
