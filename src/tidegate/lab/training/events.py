"""Events that the lab emits while it works; only the command line draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

_Item = TypeVar("_Item")


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """A run was asked to stop, and saved a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the work starts."""

    name: str
    num_runs: int
    """Runs that are still to be executed in it."""
    num_done: int = 0
    """Runs that are on record already."""
    num_later: int = 0
    """Runs of the parts after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a run."""

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
    """A message, such as that a run resumes from an older checkpoint."""

    text: str
    """One or more sentences."""
    run: str = ""
    variant: str = ""
    seed: int = 0
    """The run that it is about; run and variant are empty if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run has ended."""

    run: str
    variant: str
    seed: int
    status: str
    loss: float | None
    """On the validation set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDone:
    """The progress of other work; 0 parts are done when it starts."""

    work: str
    """The name of the work, such as "observing"."""
    done: int
    total: int
    unit: str = "part"
    """The unit in the singular, such as "sequence"."""
    item: str = ""
    """The part that was just done, in words; may be empty."""


RunEvent: TypeAlias = Progress | Notice
"""An event of a run in progress."""
Event: TypeAlias = Phase | RunEvent | Ended | PartsDone
Tell: TypeAlias = Callable[[Event], None]
"""A callback for every event."""


def ignore(_event: Event) -> None:
    """Drop an event."""


def report_parts(
    items: Sequence[_Item], tell: Tell, *, work: str, describe: Callable[[_Item], str] = str, unit: str = "part"
) -> Iterator[_Item]:
    """Yield the items, and report the start and each item as done when the next is requested.

    `work` is the name of the work; `describe` returns the words for an item, and `unit` is their unit in the singular.
    """
    for number, item in enumerate(items):
        if number == 0:
            tell(PartsDone(work=work, done=0, total=len(items), unit=unit))
        yield item
        tell(PartsDone(work=work, done=number + 1, total=len(items), unit=unit, item=describe(item)))
