"""Runs on the machines of a Ray cluster, one processor each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import ray
import ray.exceptions

from tidegate.lab.training.events import Interrupted, Progress
from tidegate.lab.training.executors.serial import note_interrupts
from tidegate.lab.training.machine import environment
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import RunContext, execute_run

_POLL_SECONDS = 0.5


@final
class RayExecutor:
    """Does runs as Ray tasks: on the cluster that `RAY_ADDRESS` names, or on this machine alone.

    The checkpoints' folder should be one that all machines see. Without it a stopped run begins anew, and ends with
    the same numbers, and the layers of trained models are not measured.
    """

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[Progress], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        board: Any = ray.remote(num_cpus=0)(_Board).remote()
        task: Any = ray.remote(_task)
        runs_of = {
            task.options(num_cpus=run.training.num_threads).remote(run, str(checkpoints), board): run for run in runs
        }
        pending, told_to_stop = list(runs_of), False
        with note_interrupts() as interrupted:
            while pending:
                if interrupted and not told_to_stop:
                    told_to_stop = True
                    ray.get(board.stop.remote())
                done, pending = ray.wait(pending, timeout=_POLL_SECONDS)
                for progress in ray.get(board.read.remote()):
                    report(progress)
                for reference in done:
                    record = _result(reference, runs_of[reference])
                    if record is not None:
                        yield record
        if interrupted:
            raise KeyboardInterrupt


@final
class _Board:
    """Where tasks post their progress, and see whether to stop."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._stopped = False

    def post(self, progress: Progress) -> bool:
        """Take a note of progress; whether the task is to stop."""
        self._latest[progress.run] = progress
        return self._stopped

    def read(self) -> list[Progress]:
        """What was posted since the last time, the latest of each run."""
        latest, self._latest = list(self._latest.values()), {}
        return latest

    def should_stop(self) -> bool:
        """Whether tasks are to stop."""
        return self._stopped

    def stop(self) -> None:
        """Ask every task to stop."""
        self._stopped = True


def _result(reference: Any, run: Run) -> Record | None:
    """What came of a task; a crash of its process is a failed run like any other."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as problem:
        return Record(id=run.id, run=run.to_dict(), status="failed", error=str(problem), environment=environment())


def _task(run: Run, checkpoints: str, board: Any) -> Record | None:
    """One run; None if it was stopped."""
    posted = 0.0
    stopped = bool(ray.get(board.should_stop.remote()))
    if stopped:
        return None

    def report(progress: Progress) -> None:
        nonlocal posted, stopped
        if time.monotonic() - posted > _POLL_SECONDS or progress.step == progress.steps:
            posted = time.monotonic()
            stopped = bool(ray.get(board.post.remote(progress)))

    try:
        return execute_run(run, RunContext(folder=Path(checkpoints), report=report, stopping=lambda: stopped))
    except Interrupted:
        return None
