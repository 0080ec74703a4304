"""Runs side by side, each in a process with threads of its own: the way to use all cores while models are small."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import final

from tidegate.lab.training.events import Interrupted, Progress
from tidegate.lab.training.executors.serial import noted_interrupt
from tidegate.lab.training.machine import environment
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import Surroundings, execute_run

# A process that was forked from one that has used PyTorch's threads may hang.
_context = multiprocessing.get_context("spawn")

_POLL_SECONDS = 0.2


@final
class ProcessExecutor:
    """Does runs in as many processes as have cores for their threads, unless told how many.

    Each process has a pipe of its own to this one and shares no lock with the others, so that one which is killed, at
    whatever moment, holds up nobody: its run is recorded as failed, and another process takes its place.
    """

    def __init__(self, num_processes: int | None = None) -> None:
        self.num_processes = num_processes

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[Progress], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        threads = max(run.training.num_threads for run in runs)
        num_workers = min(self.num_processes or max(1, len(os.sched_getaffinity(0)) // threads), len(runs))
        with noted_interrupt() as interrupted:
            crew = _Crew(deque(runs), checkpoints, report, interrupted)
            try:
                for _ in range(num_workers):
                    crew.employ()
                while crew.workers:
                    if interrupted:
                        crew.dismiss()
                    yield from crew.listen()
            finally:
                crew.dismiss()
                crew.see_off()
        if interrupted:
            raise KeyboardInterrupt


@dataclass
class _Worker:
    """A process as seen from here."""

    process: SpawnProcess
    run: Run | None = None
    """What it works on."""


class _Crew:
    """The workers, by the pipe to each, and the runs that none of them has yet."""

    def __init__(
        self, todo: deque[Run], checkpoints: Path, report: Callable[[Progress], None], interrupted: list[int]
    ) -> None:
        self.todo = todo
        self.checkpoints = checkpoints
        self.report = report
        self.interrupted = interrupted
        self.workers: dict[Connection, _Worker] = {}
        self.dismissed = False

    def employ(self) -> None:
        """Start a worker, which will say when it is ready."""
        here, there = Pipe()
        process = _context.Process(target=_work, args=(there, self.checkpoints), daemon=True)
        # Started by the first worker, the tracker would let Ctrl-C through again.
        resource_tracker.ensure_running()
        # A terminal sends Ctrl-C to the worker too; it inherits that this is held back, from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.workers[here] = _Worker(process)

    def dismiss(self) -> None:
        """Ask every worker to stop at its next step, and give out no more runs."""
        if not self.dismissed:
            self.dismissed = True
            self.todo.clear()
            for pipe in self.workers:
                _tell(pipe, None)

    def listen(self) -> Iterator[Record]:
        """Take what workers tell, for a moment at most, and give those that are ready their next run."""
        for pipe in wait(list(self.workers), timeout=_POLL_SECONDS):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                yield from self._part_with(pipe)
                continue
            if isinstance(message, Progress):
                self.report(message)
                continue
            if isinstance(message, Record):
                yield message
            self.workers[pipe].run = self.todo.popleft() if self.todo else None
            _tell(pipe, self.workers[pipe].run)

    def see_off(self) -> None:
        """Wait for workers to end; what they still tell must be read, or they wait for that."""
        while self.workers:
            for _ in self.listen():
                pass

    def _part_with(self, pipe: Connection) -> Iterator[Record]:
        """A worker has ended. If nobody asked it to, its run has failed, and a successor takes the next one."""
        worker = self.workers.pop(pipe)
        worker.process.join()
        pipe.close()
        code = worker.process.exitcode or 0
        if self.dismissed or self.interrupted:
            return
        if worker.run is not None:
            yield _lost(worker.run, code)
            if self.todo:
                self.employ()
        elif code:
            raise RuntimeError(f"A training process ended before it could begin, with exit code {code}.")


def _tell(pipe: Connection, message: Run | Progress | Record | None) -> None:
    """Send what the other side need not live to hear."""
    with suppress(OSError):
        pipe.send(message)


def _lost(run: Run, code: int) -> Record:
    """The record of a run whose process was ended by somebody else."""
    how = f"signal {-code}; if it was 9, the machine may have been out of memory" if code < 0 else f"exit code {code}"
    error = f"The process of this run was ended from outside: {how}."
    return Record(id=run.id, run=run.to_dict(), status="failed", error=error, environment=environment())


def _work(pipe: Connection, checkpoints: Path) -> None:
    """One worker: says that it is ready, then does the runs that come, until None does or nobody is there any more."""
    # A polite kill, which batch systems send to all processes of a job, stops a run like a word from the parent.
    with noted_interrupt() as killed:

        def stopping() -> bool:
            # While a run is under way, whatever can be read is a word to stop, or the end of whoever would say it.
            return bool(killed) or pipe.poll()

        around = Surroundings(folder=checkpoints, report=_Throttle(pipe).report, stopping=stopping)
        _tell(pipe, None)
        while (run := _next_run(pipe, killed)) is not None:
            try:
                record = execute_run(run, around)
            except Interrupted:
                break
            _tell(pipe, record)
    if killed:
        sys.exit(128 + killed[0])


def _next_run(pipe: Connection, killed: list[int]) -> Run | None:
    with suppress(EOFError, OSError):
        while not killed:
            if pipe.poll(_POLL_SECONDS):
                return pipe.recv()
    return None


@final
class _Throttle:
    """Passes progress on a few times a second: nobody reads faster."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.last = 0.0

    def report(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last > _POLL_SECONDS or progress.step == progress.steps:
            self.last = now
            _tell(self.pipe, progress)
