"""What all executors share: their interface, lost processes and signals; and the serial executor."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, TypeAlias, final, get_args

from tidegate._validation import InputError, require_choice
from tidegate.lab.training.events import Interrupted, Notice, RunEvent
from tidegate.lab.training.executors.resources import RunResources
from tidegate.lab.training.machine import environment
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import CHECKPOINT_SECONDS, RunContext, execute_run

ExecutorName: TypeAlias = Literal["serial", "processes", "ray"]
RETRIES = 2
"""Default number of times that a run is resumed after it lost its process."""


class Executor(Protocol):
    """Executes runs. Which executor is used changes no number of a record but its timing."""

    def require(self, runs: Sequence[Run]) -> None:
        """Raise ValueError for runs that cannot be executed here, before anything starts."""
        ...

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """Yield the record of each run as it ends; a run that fails gives a record with its traceback.

        A run whose process ends early resumes in another one, and fails only if that happens too often. Ctrl-C stops
        every run at its next step, saves its checkpoint, and raises `KeyboardInterrupt`.
        """
        ...


def make_executor(name: ExecutorName, *, retries: int = RETRIES, resources: RunResources | None = None) -> Executor:
    """Return an executor by its name.

    Args:
        name: The name.
        retries: Times that a run is resumed after it lost its process, before it has failed; a serial run has no
            process of its own.
        resources: What Ray reserves for each run; other executors take none.
    """
    require_choice("executor", name, get_args(ExecutorName))
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("retries", expected="an integer of at least 0", got=retries)
    if resources is not None and name != "ray":
        raise InputError("executor", expected="'ray' for cores, devices and processes of each run", got=name)
    match name:
        case "serial":
            return SerialExecutor()
        case "processes":
            from tidegate.lab.training.executors.processes import ProcessExecutor

            return ProcessExecutor(retries=retries)
        case "ray":
            # For each lost process Ray prints a page to standard output; it reads this variable when it is imported.
            os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
            from tidegate.lab.training.executors.ray import RayExecutor

            return RayExecutor(resources or RunResources(), retries=retries)


@final
@dataclass(frozen=True)
class SerialExecutor:
    """Executes runs one after another, in this process."""

    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def require(self, runs: Sequence[Run]) -> None:
        """See `Executor`. Every run can be executed here."""

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        with capture_signals() as captured:
            context = RunContext(
                folder=checkpoints,
                report=report,
                stopping=lambda: bool(captured),
                checkpoint_seconds=self.checkpoint_seconds,
            )
            for run in runs:
                try:
                    yield execute_run(run, context)
                except Interrupted:
                    raise KeyboardInterrupt from None
                if captured:
                    raise KeyboardInterrupt


@final
class Attempts:
    """Counts how often each run has lost its process, and decides whether it is retried."""

    def __init__(self, retries: int, report: Callable[[RunEvent], None]) -> None:
        self.retries = retries
        self._report = report
        self._losses: Counter[str] = Counter()

    def lose(self, run: Run, how: str) -> Record | None:
        """Count a lost process. Return None if the run is to be retried, with a notice, else its failed record.

        Args:
            run: The run.
            how: What ended the process, such as "by SIGKILL".
        """
        self._losses[run.id] += 1
        lost = self._losses[run.id]
        if lost <= self.retries:
            text = (
                f"Its process ended early, {how}. The run resumes from its last checkpoint, in another process: retry "
                f"{lost} of {self.retries}."
            )
            self._report(Notice(text=text, run=run.id, variant=run.label, seed=run.seed))
            return None
        times = "," if lost == 1 else f" {lost} times, the last time"
        error = f"The process of this run ended early{times} {how}. Its checkpoint is kept."
        return Record(id=run.id, run=run, status="failed", error=error, environment=environment())


@contextmanager
def capture_signals() -> Generator[list[int]]:
    """Collect the numbers of SIGINT and SIGTERM in a list, instead of interrupting what runs."""
    captured: list[int] = []

    def capture(number: int, _frame: FrameType | None) -> None:
        captured.append(number)

    before = {number: signal.signal(number, capture) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield captured
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
