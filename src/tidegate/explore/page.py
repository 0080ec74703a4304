"""The page of `tidegate explore`: one HTML file, put together from the templates of this room."""

from __future__ import annotations

from functools import cache
from importlib import resources

from tidegate.explore.gate_table import gate_table
from tidegate.report.html import embedded_json, script_hash

PARTS = {"query": "A query among keys", "surface": "A surface that bends", "gate": "Draw a gate"}
"""The parts of the page in their order: the name of the template, which is the anchor too, and the title."""

_MATHEMATICS = ("attention.js", "curvature.js", "gates.js")
_VIEWS = ("controls.js", "query_view.js", "surface_view.js", "gate_view.js")


@cache
def explore_page() -> str:
    """Return the page as one HTML document that fetches nothing and works from a disk and inside a frame.

    The mathematics is in `attention.js`, `curvature.js` and `gates.js`, in pure functions; the other scripts draw.
    """
    # Import late: what only needs the name of this function needs no templates.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tidegate.explore", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    theme = _read("tidegate.report", "theme.js")
    scripts = [_read("tidegate.explore", name) for name in _MATHEMATICS + _VIEWS]
    return environment.get_template("page.html.j2").render(
        parts=PARTS,
        style=_read("tidegate.report", "style.css") + _read("tidegate.explore", "explore.css"),
        theme=theme,
        scripts=scripts,
        gate_table=embedded_json(gate_table()),
        policy=" ".join(map(script_hash, [theme, *scripts])),
    )


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")
