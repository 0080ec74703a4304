"""One run after another, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import final

from tidegate.lab.training.events import Interrupted, RunEvent
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import RunContext, execute_run


@final
class SerialExecutor:
    """Do runs one after another."""

    def require(self, runs: Sequence[Run]) -> None:
        """See `Executor`. Every run can be done here."""

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        with note_interrupts() as interrupted:
            context = RunContext(folder=checkpoints, report=report, stopping=lambda: bool(interrupted))
            for run in runs:
                try:
                    yield execute_run(run, context)
                except Interrupted:
                    raise KeyboardInterrupt from None
                if interrupted:
                    raise KeyboardInterrupt


@contextmanager
def note_interrupts() -> Generator[list[int]]:
    """Collect the numbers of SIGINT and SIGTERM in a list, instead of breaking off whatever runs."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
