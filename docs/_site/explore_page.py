"""Put the page of `tidegate explore` into the site, and show it in its document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.explore import explore_page

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCUMENT = "docs/explore"
PLACE = "explore.html"
"""In the root of the site; the document's own page has the same name in `docs/`."""
MARK = "<!-- The site shows the page here. -->"
"""Marks the place in the document. GitHub, which runs no scripts, shows nothing there."""
FRAME = f"""<p><a href="../{PLACE}">Open the page in its own window</a></p>
<iframe class="explore" src="../{PLACE}" title="Interactive page" loading="lazy"></iframe>"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", show_page)
    app.connect("build-finished", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def show_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the mark in the document by a link and a frame."""
    if page == DOCUMENT:
        if source[0].count(MARK) != 1:
            raise ValueError(f"{DOCUMENT}.md must have the line {MARK!r} once, where the site shows the page.")
        source[0] = source[0].replace(MARK, FRAME)


def write_page(app: Sphinx, error: Exception | None) -> None:
    """Write the page of `tidegate explore`."""
    if error is None and app.builder.format == "html":
        (app.outdir / PLACE).write_bytes(explore_page().encode())
