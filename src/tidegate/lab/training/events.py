"""What the lab says while it works; only the command line draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

Tell: TypeAlias = Callable[[int, int], None]
"""Hears how many parts of how many are done."""

_Part = TypeVar("_Part")


def silent(_done: int, _whole: int) -> None:
    """Tell nobody."""


def told(parts: Sequence[_Part], tell: Tell) -> Iterator[_Part]:
    """The parts of some work, one after another; `tell` hears when each is done."""
    for number, part in enumerate(parts, start=1):
        yield part
        tell(number, len(parts))


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """A run was asked to stop, and saved what it needs to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the work begins."""

    name: str
    num_runs: int
    """Runs that are still to be done in it."""
    num_done: int = 0
    """Runs that were there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands."""

    run: str
    variant: str
    seed: int
    role: str
    step: int
    steps: int
    tokens: int
    loss: float
    """Of the last batch."""
    seconds: float
    """Spent on training so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run is over."""

    run: str
    variant: str
    seed: int
    status: str
    loss: float | None
    """On the validation set."""


Event: TypeAlias = Phase | Progress | Ended
