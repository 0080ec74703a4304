"""The verdicts of a comparison, which `judging` returns and pages show."""

from __future__ import annotations

from typing import Literal, TypeAlias

VerdictWord: TypeAlias = Literal[
    "control", "better", "worse", "equivalent", "inconclusive", "identical", "diverged", "undecided"
]
"""The verdict on a variant; `undecided` if it cannot be judged, `diverged` if a run diverged."""

Effect: TypeAlias = Literal["helps", "harms", "not shown"]
"""The effect of a mechanism: `helps` and `harms` hold against the control and against every placebo."""
