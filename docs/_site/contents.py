"""Make the README the start page: add the site's table of contents, and serve and link it as `index.html`."""

import shutil
from pathlib import Path

from sphinx.application import Sphinx

CONTENTS = Path(__file__).with_suffix(".md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", link_to_index)
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_start_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_to_index(app: Sphinx) -> None:
    """Make links to the README, including that of the site's name, lead to `index.html`."""
    if app.builder.format == "html":
        target_of = app.builder.get_target_uri

        def get_target_uri(page: str, typ: str | None = None) -> str:
            return "index.html" if page == app.config.root_doc else target_of(page, typ)

        app.builder.get_target_uri = get_target_uri


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the table of contents, which GitHub would show as code."""
    if page == app.config.root_doc:
        source[0] = f"{source[0]}\n\n{CONTENTS.read_text(encoding='utf-8')}"


def copy_start_page(app: Sphinx, error: Exception | None) -> None:
    """Copy the README's page to `index.html`."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
