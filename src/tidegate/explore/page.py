"""The page of `tidegate explore`: one HTML file, rendered from the templates of this package."""

from __future__ import annotations

from functools import cache
from importlib import resources

from tidegate.explore.gate_table import gate_table
from tidegate.report.html import embedded_json, script_hash

PARTS = {"query": "A query among keys", "surface": "Curvature of a head's outputs", "gate": "Build a gate"}
"""The parts of the page: the name of the template, which is also the anchor, and the title."""

_MATHEMATICS = ("attention.js", "curvature.js", "gates.js")
_VIEWS = ("controls.js", "query_view.js", "surface_view.js", "gate_view.js")


@cache
def explore_page() -> str:
    """Return the page as one HTML document that loads nothing from the network and works inside a frame.

    `attention.js`, `curvature.js` and `gates.js` compute, in pure functions; the other scripts draw.
    """
    # `jinja2` is imported only when a page is rendered.
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
