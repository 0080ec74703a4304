"""Runs on the machines of a Ray cluster, one processor each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import ray
import ray.exceptions

from tidegate.lab.training.events import Interrupted, Notice, Progress, RunEvent
from tidegate.lab.training.executors.attempts import RETRIES, Attempts
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
    the same numbers, and the layers of trained models are not measured. A run that loses its process goes on in another
    one, as those of `ProcessExecutor` do: Ray's own retries, which give no reason and are unbounded when memory is
    short, are turned off.
    """

    def __init__(self, *, retries: int = RETRIES) -> None:
        self.retries = retries

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        # Killed, the board starts anew, and its callers ask again.
        board: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Board).remote()
        tasks = _Tasks(board, checkpoints, Attempts(self.retries, report))
        for run in runs:
            tasks.submit(run)
        with note_interrupts() as interrupted:
            while tasks.pending:
                if interrupted:
                    ray.get(board.stop.remote())
                done, _ = ray.wait(list(tasks.pending), timeout=_POLL_SECONDS)
                for event in ray.get(board.read.remote()):
                    report(event)
                for reference in done:
                    record = tasks.take(reference, try_again=not interrupted)
                    if record is not None:
                        yield record
        if interrupted:
            raise KeyboardInterrupt


@final
class _Tasks:
    """The tasks that are under way, and the runs that they do."""

    def __init__(self, board: Any, checkpoints: Path, attempts: Attempts) -> None:
        self.pending: dict[Any, Run] = {}
        self._arguments = (str(checkpoints), board)
        self._attempts = attempts
        self._task: Any = ray.remote(max_retries=0)(_task)

    def submit(self, run: Run) -> None:
        """Have Ray do a run."""
        reference = self._task.options(num_cpus=run.training.num_threads).remote(run, *self._arguments)
        self.pending[reference] = run

    def take(self, reference: Any, *, try_again: bool) -> Record | None:
        """Return the record of a task that is done; None if it was stopped, or if its run was submitted again."""
        run = self.pending.pop(reference)
        outcome = _outcome(reference, run)
        if not isinstance(outcome, str):
            return outcome
        record = self._attempts.lose(run, outcome) if try_again else None
        if try_again and record is None:
            self.submit(run)
        return record


@final
class _Board:
    """Where tasks post what they say, and see whether to stop."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []
        self._latest: dict[str, Progress] = {}
        self._stopped = False

    def post(self, event: RunEvent) -> bool:
        """Take a note of an event; whether the task is to stop."""
        if isinstance(event, Progress):
            self._latest[event.run] = event
        else:
            self._notices.append(event)
        return self._stopped

    def read(self) -> list[RunEvent]:
        """What was posted since the last time: every notice, and the latest progress of each run."""
        posted = [*self._notices, *self._latest.values()]
        self._notices, self._latest = [], {}
        return posted

    def should_stop(self) -> bool:
        """Whether tasks are to stop."""
        return self._stopped

    def stop(self) -> None:
        """Ask every task to stop."""
        self._stopped = True


def _outcome(reference: Any, run: Run) -> Record | str | None:
    """What came of a task; None if it was stopped, and a text if its process was ended: what ended it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        return Record(id=run.id, run=run.to_dict(), status="failed", error=str(problem), environment=environment())
    except ray.exceptions.OutOfMemoryError:
        return "by Ray for lack of memory"
    except ray.exceptions.WorkerCrashedError:
        return "by a signal or a crash, possibly for lack of memory"
    except ray.exceptions.RayError as problem:
        return f"by {type(problem).__name__} of Ray"


def _task(run: Run, checkpoints: str, board: Any) -> Record | None:
    """One run; None if it was stopped."""
    posted = 0.0
    stopped = bool(ray.get(board.should_stop.remote()))
    if stopped:
        return None

    def report(event: RunEvent) -> None:
        nonlocal posted, stopped
        is_due = time.monotonic() - posted > _POLL_SECONDS
        if is_due or not isinstance(event, Progress) or event.step == event.steps:
            posted = time.monotonic()
            stopped = bool(ray.get(board.post.remote(event)))

    try:
        return execute_run(run, RunContext(folder=Path(checkpoints), report=report, stopping=lambda: stopped))
    except Interrupted:
        return None
