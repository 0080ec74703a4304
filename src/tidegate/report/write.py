"""A page and its twins on disk."""

from __future__ import annotations

from pathlib import Path

from tidegate._files import write_atomically
from tidegate.report.embed import json_text
from tidegate.report.html import html_page
from tidegate.report.markdown import markdown_page
from tidegate.report.page import Page


def write_page(page: Page, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `results.json`, and give the path of the first.

    The folder is made where it is missing. Nothing is written unless all three could be made. Each file is written
    beside its place and then moved there, so that a reader never meets half of one.
    """
    texts = {
        "results.json": json_text(page.data) + "\n",
        "report.md": markdown_page(page),
        "report.html": html_page(page),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        content = text.encode()
        write_atomically(folder / name, lambda path, content=content: path.write_bytes(content))
    return folder / "report.html"
