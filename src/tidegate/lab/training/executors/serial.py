"""One run after another, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import final

from tidegate.lab.training.events import Interrupted, Progress
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import Surroundings, execute_run


@final
class SerialExecutor:
    """Does runs one after another."""

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[Progress], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        with noted_interrupt() as interrupted:
            around = Surroundings(folder=checkpoints, report=report, stopping=lambda: bool(interrupted))
            for run in runs:
                try:
                    yield execute_run(run, around)
                except Interrupted:
                    raise KeyboardInterrupt from None
                if interrupted:
                    raise KeyboardInterrupt


@contextmanager
def noted_interrupt() -> Generator[list[int]]:
    """Ctrl-C and a polite kill are noted in the list that this gives, instead of breaking off whatever runs."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
