"""Runs side by side, each in a process with threads of its own: the way to use all cores while models are small."""

from __future__ import annotations

import multiprocessing
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

from tidegate.lab.training.events import Interrupted, Notice, Progress, RunEvent
from tidegate.lab.training.executors.attempts import RETRIES, Attempts, ExitReasons
from tidegate.lab.training.executors.serial import note_interrupts
from tidegate.lab.training.machine import num_cores
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import CHECKPOINT_SECONDS, RunContext, execute_run

# A process that was forked from one that has used PyTorch's threads may hang.
_context = multiprocessing.get_context("spawn")

_POLL_SECONDS = 0.2


@final
class ProcessExecutor:
    """Does runs in as many processes as have cores for their threads, unless told how many.

    Each process has a pipe of its own to this one and shares no lock with the others, so that one which is killed, at
    whatever moment, does not block the others. Another process takes its place, and its run goes on there from its last
    checkpoint; a run that loses its process more than `retries` times is recorded as failed.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        retries: int = RETRIES,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        self.num_processes = num_processes
        self.retries = retries
        self.checkpoint_seconds = checkpoint_seconds

    def require(self, runs: Sequence[Run]) -> None:
        """See `Executor`. Every run can be done here."""

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        threads = max(run.training.num_threads for run in runs)
        num_workers = min(self.num_processes or max(1, num_cores() // threads), len(runs))
        with note_interrupts() as interrupted:
            pool = _WorkerPool(
                deque(runs),
                checkpoints,
                report,
                interrupted,
                retries=self.retries,
                checkpoint_seconds=self.checkpoint_seconds,
            )
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
    ready: bool = False
    """Whether it has begun, and asked for a run."""
    run: Run | None = None
    """What it works on."""


class _WorkerPool:
    """The workers, by the pipe to each, and the runs that are not handed out yet."""

    def __init__(
        self,
        todo: deque[Run],
        checkpoints: Path,
        report: Callable[[RunEvent], None],
        interrupted: list[int],
        *,
        retries: int,
        checkpoint_seconds: float,
    ) -> None:
        self.todo = todo
        self.checkpoints = checkpoints
        self.checkpoint_seconds = checkpoint_seconds
        self.report = report
        self.interrupted = interrupted
        self.workers: dict[Connection, _Worker] = {}
        self.stopped = False
        self.attempts = Attempts(retries, report)
        self.reasons = ExitReasons()
        self.false_starts = 0
        """Workers that ended before they were ready, since one last was."""

    def start_worker(self) -> None:
        """Start a worker; it sends None when it is ready for a run."""
        here, there = Pipe()
        arguments = (there, self.checkpoints, self.checkpoint_seconds)
        process = _context.Process(target=_run_worker, args=arguments, daemon=True)
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
            if isinstance(message, RunEvent):
                self.report(message)
                continue
            if isinstance(message, Record):
                yield message
            worker = self.workers[pipe]
            worker.ready, self.false_starts = True, 0
            worker.run = self.todo.popleft() if self.todo else None
            _send(pipe, worker.run)

    def drain(self) -> None:
        """Wait for all workers to end, reading what they still send: a worker with a full pipe would never end."""
        while self.workers:
            for _ in self.receive():
                pass

    def _remove_worker(self, pipe: Connection) -> Iterator[Record]:
        """Remove a worker that has ended. If it was not asked to, a new one takes its place."""
        worker = self.workers.pop(pipe)
        worker.process.join()
        pipe.close()
        has_ended_by_itself = worker.ready and worker.run is None
        if self.stopped or self.interrupted or has_ended_by_itself:
            return
        if worker.run is not None:
            record = self.attempts.lose(worker.run, self._ending(worker))
            if record is None:
                self.todo.appendleft(worker.run)
            else:
                yield record
        else:
            self._count_false_start(self._ending(worker))
        if self.todo:
            self.start_worker()

    def _ending(self, worker: _Worker) -> str:
        return self.reasons.describe(worker.process.exitcode or 0)

    def _count_false_start(self, how: str) -> None:
        self.false_starts += 1
        if self.false_starts > self.attempts.retries:
            raise ChildProcessError(
                f"A training process ended before it could begin, {how}. Free memory, or use the executor serial."
            )
        self.report(Notice(text=f"A training process ended before it could begin, {how}. Another takes its place."))


def _send(pipe: Connection, message: Run | RunEvent | Record | None) -> None:
    """Send, ignoring a closed pipe."""
    with suppress(OSError):
        pipe.send(message)


def _run_worker(pipe: Connection, checkpoints: Path, checkpoint_seconds: float) -> None:
    """Be a worker: send None when ready, then do the runs that come, until None comes or the pipe is closed."""
    # SIGTERM, which batch systems send to all processes of a job, stops a run like a message of the parent.
    with note_interrupts() as killed:

        def stopping() -> bool:
            # While a run is under way, whatever can be read is the message to stop, or the end of a closed pipe.
            return bool(killed) or pipe.poll()

        context = RunContext(
            folder=checkpoints,
            report=_Throttle(pipe).report,
            stopping=stopping,
            checkpoint_seconds=checkpoint_seconds,
        )
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
    """Pass progress on a few times a second, since nobody reads faster, and all else at once."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.last = 0.0

    def report(self, event: RunEvent) -> None:
        now = time.monotonic()
        if not isinstance(event, Progress):
            _send(self.pipe, event)
        elif now - self.last > _POLL_SECONDS or event.step == event.steps:
            self.last = now
            _send(self.pipe, event)
