"""Make the README the start page: give it the site's table of contents, and serve it as `index.html` as well."""

import shutil
from pathlib import Path

from sphinx.application import Sphinx

CONTENTS = Path(__file__).with_suffix(".md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_start_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the table of contents, which GitHub would show as code."""
    if page == app.config.root_doc:
        source[0] = f"{source[0]}\n\n{CONTENTS.read_text(encoding='utf-8')}"


def copy_start_page(app: Sphinx, error: Exception | None) -> None:
    """Copy the README's page to where a browser looks for the first one."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
