"""Put the page of `tidegate explore` into the site, and show it in its document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.explore import explore_page

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCUMENT = "docs/explore"
PLACE = "explore.html"
"""In the root of the site; the document's own page has this name in the folder below."""
MARK = "<!-- The site shows the page here. -->"
"""Where the document shows it. On GitHub, which runs no scripts, nothing is seen."""
FRAME = f"""<p><a href="../{PLACE}">Open the page in a window of its own</a></p>
<iframe class="explore" src="../{PLACE}" title="A page to play with" loading="lazy"></iframe>"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", show_page)
    app.connect("build-finished", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def show_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put a link and a frame where the document has its mark."""
    if page == DOCUMENT:
        if source[0].count(MARK) != 1:
            raise ValueError(f"{DOCUMENT}.md must have the line {MARK!r} once, where the site shows the page.")
        source[0] = source[0].replace(MARK, FRAME)


def write_page(app: Sphinx, error: Exception | None) -> None:
    """Write what `tidegate explore` writes."""
    if error is None and app.builder.format == "html":
        (app.outdir / PLACE).write_bytes(explore_page().encode())
