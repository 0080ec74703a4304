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
from tidegate.lab.training.executors.serial import note_interrupts
from tidegate.lab.training.machine import environment
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import RunContext, execute_run

# A process that was forked from one that has used PyTorch's threads may hang.
_context = multiprocessing.get_context("spawn")

_POLL_SECONDS = 0.2


@final
class ProcessExecutor:
    """Does runs in as many processes as have cores for their threads, unless told how many.

    Each process has a pipe of its own to this one and shares no lock with the others, so that one which is killed, at
    whatever moment, does not block the others: its run is recorded as failed, and another process takes its place.
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
        with note_interrupts() as interrupted:
            pool = _WorkerPool(deque(runs), checkpoints, report, interrupted)
            try:
                for _ in range(num_workers):
                    pool.start_worker()
                while pool.workers:
                    if interrupted:
                        pool.stop()
                    yield from pool.receive()
            finally:
                pool.stop()
                pool.drain()
        if interrupted:
            raise KeyboardInterrupt


@dataclass
class _Worker:
    """A worker process and its run."""

    process: SpawnProcess
    run: Run | None = None
    """What it works on."""


class _WorkerPool:
    """The workers, by the pipe to each, and the runs that are not handed out yet."""

    def __init__(
        self, todo: deque[Run], checkpoints: Path, report: Callable[[Progress], None], interrupted: list[int]
    ) -> None:
        self.todo = todo
        self.checkpoints = checkpoints
        self.report = report
        self.interrupted = interrupted
        self.workers: dict[Connection, _Worker] = {}
        self.stopped = False

    def start_worker(self) -> None:
        """Start a worker; it sends None when it is ready for a run."""
        here, there = Pipe()
        process = _context.Process(target=_run_worker, args=(there, self.checkpoints), daemon=True)
        # Started by the first worker, the tracker would unblock Ctrl-C again.
        resource_tracker.ensure_running()
        # A terminal sends Ctrl-C to the worker too; blocked here, it is blocked in the worker from its start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.workers[here] = _Worker(process)

    def stop(self) -> None:
        """Ask every worker to stop at its next step, and hand out no more runs."""
        if not self.stopped:
            self.stopped = True
            self.todo.clear()
            for pipe in self.workers:
                _send(pipe, None)

    def receive(self) -> Iterator[Record]:
        """Receive messages of workers, waiting a moment at most, and give those that are ready their next run."""
        for pipe in wait(list(self.workers), timeout=_POLL_SECONDS):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                yield from self._remove_worker(pipe)
                continue
            if isinstance(message, Progress):
                self.report(message)
                continue
            if isinstance(message, Record):
                yield message
            self.workers[pipe].run = self.todo.popleft() if self.todo else None
            _send(pipe, self.workers[pipe].run)

    def drain(self) -> None:
        """Wait for all workers to end, reading what they still send: a worker with a full pipe would never end."""
        while self.workers:
            for _ in self.receive():
                pass

    def _remove_worker(self, pipe: Connection) -> Iterator[Record]:
        """Remove a worker that has ended. If it was not asked to, its run failed, and a new one is started."""
        worker = self.workers.pop(pipe)
        worker.process.join()
        pipe.close()
        code = worker.process.exitcode or 0
        if self.stopped or self.interrupted:
            return
        if worker.run is not None:
            yield _killed_record(worker.run, code)
            if self.todo:
                self.start_worker()
        elif code:
            raise RuntimeError(f"A training process ended before it could begin, with exit code {code}.")


def _send(pipe: Connection, message: Run | Progress | Record | None) -> None:
    """Send, ignoring a closed pipe."""
    with suppress(OSError):
        pipe.send(message)


def _killed_record(run: Run, code: int) -> Record:
    """Make the record of a run whose process was killed from outside."""
    how = f"signal {-code}; if it was 9, the machine may have been out of memory" if code < 0 else f"exit code {code}"
    error = f"The process of this run was ended from outside: {how}."
    return Record(id=run.id, run=run.to_dict(), status="failed", error=error, environment=environment())


def _run_worker(pipe: Connection, checkpoints: Path) -> None:
    """Be a worker: send None when ready, then do the runs that come, until None comes or the pipe is closed."""
    # SIGTERM, which batch systems send to all processes of a job, stops a run like a message of the parent.
    with note_interrupts() as killed:

        def stopping() -> bool:
            # While a run is under way, whatever can be read is the message to stop, or the end of a closed pipe.
            return bool(killed) or pipe.poll()

        context = RunContext(folder=checkpoints, report=_Throttle(pipe).report, stopping=stopping)
        _send(pipe, None)
        while (run := _next_run(pipe, killed)) is not None:
            try:
                record = execute_run(run, context)
            except Interrupted:
                break
            _send(pipe, record)
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
    """Pass progress on a few times a second: nobody reads faster."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.last = 0.0

    def report(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last > _POLL_SECONDS or progress.step == progress.steps:
            self.last = now
            _send(self.pipe, progress)
