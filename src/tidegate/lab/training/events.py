"""What the lab says while it works; only the command line draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

_Item = TypeVar("_Item")


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
    num_later: int = 0
    """Runs of the parts after it."""


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
    flops: float = 0.0
    """Multiplications and additions of the training so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Something to know: what is about to be done, or that a run goes on from an older checkpoint."""

    text: str
    """One or more sentences."""
    run: str = ""
    variant: str = ""
    seed: int = 0
    """The run that it happened to; run and variant are empty if it was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run is over."""

    run: str
    variant: str
    seed: int
    status: str
    loss: float | None
    """On the validation set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDone:
    """Some work has come so far; 0 parts are done when it begins."""

    work: str
    """Names the work, such as "observing"."""
    done: int
    total: int
    unit: str = "part"
    """What is counted, in the singular, such as "sequence"."""
    item: str = ""
    """The part that was just done, in words; empty if its number says it all."""


RunEvent: TypeAlias = Progress | Notice
"""What a run says while it is under way."""
Event: TypeAlias = Phase | RunEvent | Ended | PartsDone
Tell: TypeAlias = Callable[[Event], None]
"""Receives every event."""


def ignore(_event: Event) -> None:
    """Drop an event."""


def report_parts(
    items: Sequence[_Item], tell: Tell, *, work: str, describe: Callable[[_Item], str] = str, unit: str = "part"
) -> Iterator[_Item]:
    """Yield the items one after another; report the beginning, and each item as done when the next is asked for.

    describe : gives the words for an item
    """
    for number, item in enumerate(items):
        if number == 0:
            tell(PartsDone(work=work, done=0, total=len(items), unit=unit))
        yield item
        tell(PartsDone(work=work, done=number + 1, total=len(items), unit=unit, item=describe(item)))
