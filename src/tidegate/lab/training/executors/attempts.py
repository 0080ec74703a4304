"""Runs whose process ended before they did: tried again a number of times, then recorded as failed."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import final

from tidegate._validation import InputError
from tidegate.lab.training.events import Notice, RunEvent
from tidegate.lab.training.machine import environment, out_of_memory_kills
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run

RETRIES = 2
"""Times that a run is tried again, unless an executor is told otherwise."""


def require_retries(retries: int) -> None:
    """Raise InputError for what is not an integer of at least 0."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("retries", expected="an integer of at least 0", got=retries)


@final
class Attempts:
    """How often each run has lost its process, and what follows from it."""

    def __init__(self, retries: int, report: Callable[[RunEvent], None]) -> None:
        self.retries = retries
        self._report = report
        self._losses: Counter[str] = Counter()

    def lose(self, run: Run, how: str) -> Record | None:
        """Count a lost process; None if the run is to be tried again, which is reported, else its failed record.

        how : what ended the process, such as "by SIGKILL"
        """
        self._losses[run.id] += 1
        lost = self._losses[run.id]
        if lost <= self.retries:
            text = (
                f"Its process ended early, {how}. The run goes on from its last checkpoint, in another process: retry "
                f"{lost} of {self.retries}."
            )
            label = run.label
            self._report(Notice(text=text, run=run.id, variant=label, seed=run.seed))
            return None
        times = "," if lost == 1 else f" {lost} times, the last time"
        error = f"The process of this run ended early{times} {how}. Its checkpoint is kept."
        return Record(id=run.id, run=run, status="failed", error=error, environment=environment())


@final
class ExitReasons:
    """Says in words what ended a process, and whether the kernel has killed any for lack of memory since the start."""

    def __init__(self) -> None:
        self._kills_before = out_of_memory_kills()

    def describe(self, code: int) -> str:
        """Return such words as "by SIGTERM" for the exit code of a process.

        code : negative for a signal, as multiprocessing has it; 128 and a signal's number as shells and workers do
        """
        number = -code if code < 0 else code - 128
        try:
            name = signal.Signals(number).name
        except ValueError:
            return f"with exit code {code}"
        return f"by {name}{self._memory() if number == signal.SIGKILL else ''}"

    def _memory(self) -> str:
        kills = out_of_memory_kills()
        if self._kills_before is None or kills is None:
            return ", possibly for lack of memory"
        # Which process the kernel killed is not known, and a control group may hide its kills.
        if kills > self._kills_before:
            return ": since these runs began the kernel has killed a process for lack of memory"
        return ", with no sign of a lack of memory"
