"""A page and its twins on disk."""

from __future__ import annotations

from pathlib import Path

from tidegate._files import write_content
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
        write_content(folder / name, text.encode())
    return folder / "report.html"
