"""The words for what a comparison says of a variant: judging gives them, and pages show them."""

from __future__ import annotations

from typing import Literal, TypeAlias

VerdictWord: TypeAlias = Literal[
    "control", "better", "worse", "equivalent", "inconclusive", "identical", "diverged", "undecided"
]
"""What a comparison says of a variant; `undecided` is a refusal to judge, `diverged` says that a run had no end."""

Effect: TypeAlias = Literal["helps", "harms", "not shown"]
"""What is known of a mechanism: `helps` and `harms` hold against the control and against every placebo."""
