"""What every way of doing many runs has in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, get_args

from tidegate._validation import InputError, require_choice
from tidegate.lab.training.events import RunEvent
from tidegate.lab.training.executors.attempts import RETRIES, require_retries
from tidegate.lab.training.executors.resources import RunResources
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run

ExecutorName: TypeAlias = Literal["serial", "processes", "ray"]


class Executor(Protocol):
    """Does runs. Which one does them changes no number of a record but its timing."""

    def require(self, runs: Sequence[Run]) -> None:
        """Refuse runs that cannot be done here, before anything starts; a `ValueError` says why."""
        ...

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """The record of each run, as they end; a run that fails gives a record with its traceback.

        A run whose process ends early goes on in another one, and fails only if that happens too often.

        Ctrl-C stops every run at its next step, saves what it needs to go on, and raises `KeyboardInterrupt`.
        """
        ...


def executor_of(name: ExecutorName, *, retries: int = RETRIES, resources: RunResources | None = None) -> Executor:
    """An executor by its name.

    retries   : times that a run goes on in another process after its own ended early, before it has failed. Serially
                there is no process but this one
    resources : what Ray sets aside for each run; other executors take none
    """
    require_choice("executor", name, get_args(ExecutorName))
    require_retries(retries)
    if resources is not None and name != "ray":
        raise InputError("executor", expected="'ray' for cores, devices and processes of each run", got=name)
    match name:
        case "serial":
            from tidegate.lab.training.executors.serial import SerialExecutor

            return SerialExecutor()
        case "processes":
            from tidegate.lab.training.executors.processes import ProcessExecutor

            return ProcessExecutor(retries=retries)
        case "ray":
            # Of each process that is lost Ray prints a page to the standard output, and reads this when it is imported.
            os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
            from tidegate.lab.training.executors.ray import RayExecutor

            return RayExecutor(resources, retries=retries)
