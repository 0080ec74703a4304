"""What the page knows of gates: what can be chosen, which have names, and what `Gate` refuses, and why."""

from __future__ import annotations

from itertools import groupby, product
from typing import Any, get_args

from tidegate._validation import InputError
from tidegate.gate import PRESETS, Activation, Gate, Grain, Op, Reads, Share, Site

CHOICES: dict[str, tuple[str, ...]] = {
    "site": get_args(Site),
    "reads": get_args(Reads),
    "grain": get_args(Grain),
    "share": get_args(Share),
    "op": get_args(Op),
    "activation": get_args(Activation),
}
"""The fields that the page offers in words."""
NUMBERS: dict[str, tuple[int, ...]] = {
    "rank": (1, 2, 4, 8, 16, 32),
    "width": (4, 12, 32, 64),
    "bias": (-2, -1, 0, 1, 2),
}
"""The fields that the page offers as numbers; each may also be left out."""


def gate_table() -> dict[str, Any]:
    """Return choices, presets and refusals as a JSON value.

    Every combination of words, with each number left out or given, was handed to `Gate`. `refusals` has what came of
    them in order, the last field first to change, as pairs: a place in `reasons`, or -1 for a gate, and how many
    combinations in a row have it. Whether a number is given decides, and not which.
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
    """Say why `Gate` refuses these fields; empty if it does not."""
    try:
        Gate(**fields)
    except InputError as error:
        # Without the value that was given: the same reason holds for other numbers.
        return str(InputError(error.field, expected=error.expected, hint=error.hint))
    return ""
