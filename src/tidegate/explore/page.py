"""The page of `tidegate explore`, rendered from the templates of this package, and its table of gates."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product
from typing import Any, get_args

from tidegate._validation import InputError
from tidegate.gate import PRESETS, Activation, Gate, Grain, Op, Reads, Share, Site
from tidegate.report.html import embedded_json, read_template, script_hash, template_environment

PARTS = {"query": "A query among keys", "surface": "Curvature of a head's outputs", "gate": "Build a gate"}
"""The parts of the page: the name of the template, which is also the anchor, and the title."""

CHOICES: dict[str, tuple[str, ...]] = {
    "site": get_args(Site),
    "reads": get_args(Reads),
    "grain": get_args(Grain),
    "share": get_args(Share),
    "op": get_args(Op),
    "activation": get_args(Activation),
}
"""The fields with a list of values."""
NUMBERS: dict[str, tuple[int, ...]] = {
    "rank": (1, 2, 4, 8, 16, 32),
    "width": (4, 12, 32, 64),
    "bias": (-2, -1, 0, 1, 2),
}
"""The numeric fields; each may also be omitted."""

_MATHEMATICS = ("attention.js", "curvature.js", "gates.js")
_VIEWS = ("controls.js", "query_view.js", "surface_view.js", "gate_view.js")


@cache
def explore_page() -> str:
    """Return the page as one HTML document that loads nothing from the network and works inside a frame.

    `attention.js`, `curvature.js` and `gates.js` compute, in pure functions; the other scripts draw.
    """
    theme = read_template("tidegate.report", "theme.js")
    scripts = [read_template("tidegate.explore", name) for name in _MATHEMATICS + _VIEWS]
    return (
        template_environment("tidegate.explore")
        .get_template("page.html.j2")
        .render(
            parts=PARTS,
            style=read_template("tidegate.report", "style.css") + read_template("tidegate.explore", "explore.css"),
            theme=theme,
            scripts=scripts,
            gate_table=embedded_json(gate_table()),
            policy=" ".join(map(script_hash, [theme, *scripts])),
        )
    )


def gate_table() -> dict[str, Any]:
    """Return choices, presets and invalid combinations as a JSON value.

    `refusals` lists all combinations of choices, with each number omitted or given, in the order of `product`. It is
    run-length encoded: pairs of an index in `reasons`, or -1 for a valid gate, and a count. The value of a number does
    not matter, only its presence.
    """
    given = [(None, numbers[0]) for numbers in NUMBERS.values()]
    names = (*CHOICES, *NUMBERS)
    found = [_reason(dict(zip(names, values, strict=True))) for values in product(*CHOICES.values(), *given)]
    reasons = sorted({reason for reason in found if reason})
    runs = [(reasons.index(reason) if reason else -1, len(list(run))) for reason, run in groupby(found)]
    return {
        "choices": CHOICES,
        "numbers": NUMBERS,
        "presets": {name: {field: getattr(gate, field) for field in names} for name, gate in PRESETS.items()},
        "names": {gate.spelling: name for name, gate in PRESETS.items()},
        "reasons": reasons,
        "refusals": runs,
    }


def _reason(fields: dict[str, Any]) -> str:
    """Return the error of `Gate` for these fields; empty if they are valid."""
    try:
        Gate(**fields)
    except InputError as error:
        # The given value is left out, because the reason holds for other numbers too.
        return str(InputError(error.field, expected=error.expected, hint=error.hint))
    return ""
