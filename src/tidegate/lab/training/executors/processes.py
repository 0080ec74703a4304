"""Execute runs in parallel processes, which uses all cores while models are small."""

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
from tidegate.lab.training.executors.executor import RETRIES, Attempts, capture_signals
from tidegate.lab.training.machine import num_cores, out_of_memory_kills
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import CHECKPOINT_SECONDS, RunContext, execute_run

# A process forked from one that has used PyTorch's threads may hang.
_context = multiprocessing.get_context("spawn")

_POLL_SECONDS = 0.2


@final
@dataclass(frozen=True)
class ProcessExecutor:
    """Executes runs in `num_processes` processes; None is as many as there are cores for their threads.

    Each process has its own pipe to this one and shares no lock with the others, so that a killed process never blocks
    them. A new process resumes its run from the last checkpoint; a run that loses its process more than `retries` times
    is recorded as failed.
    """

    num_processes: int | None = None
    retries: int = RETRIES
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def require(self, runs: Sequence[Run]) -> None:
        """See `Executor`. Every run can be executed here."""

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        threads = max(run.training.num_threads for run in runs)
        num_workers = min(self.num_processes or max(1, num_cores() // threads), len(runs))
        with capture_signals() as captured:
            pool = _WorkerPool(
                deque(runs), captured, Attempts(self.retries, report), report, (checkpoints, self.checkpoint_seconds)
            )
            try:
                for _ in range(num_workers):
                    pool.start_worker()
                while pool.workers:
                    if captured:
                        pool.stop()
                    yield from pool.receive()
            finally:
                pool.stop()
                # A worker with a full pipe would never end, so read all messages.
                while pool.workers:
                    for _ in pool.receive():
                        pass
        if captured:
            raise KeyboardInterrupt


@dataclass
class _Worker:
    """A worker process and its run."""

    process: SpawnProcess
    ready: bool = False
    """Whether it has started, and asked for a run."""
    run: Run | None = None


@dataclass
class _WorkerPool:
    """The workers, by the pipe to each, and the runs that are still to be handed out."""

    todo: deque[Run]
    captured: list[int]
    """Signals that this process received."""
    attempts: Attempts
    report: Callable[[RunEvent], None]
    saving: tuple[Path, float]
    """The folder of checkpoints, and the seconds between two checkpoints."""

    def __post_init__(self) -> None:
        self.workers: dict[Connection, _Worker] = {}
        self.stopped = False
        self.kills_before = out_of_memory_kills()
        self.false_starts = 0
        """Number of workers in a row that ended before they were ready."""

    def start_worker(self) -> None:
        """Start a worker; it sends None when it is ready for a run."""
        here, there = Pipe()
        process = _context.Process(target=_run_worker, args=(there, *self.saving), daemon=True)
        # If the first worker started it, the tracker would unblock Ctrl-C.
        resource_tracker.ensure_running()
        # A terminal sends Ctrl-C to the worker too; workers inherit the blocked signal.
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
        """Receive messages of workers for a moment, and send the next run to those that are ready."""
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

    def _remove_worker(self, pipe: Connection) -> Iterator[Record]:
        """Remove a worker that has ended. If it was not asked to, start another in its place."""
        worker = self.workers.pop(pipe)
        worker.process.join()
        pipe.close()
        was_done = worker.ready and worker.run is None
        if self.stopped or self.captured or was_done:
            return
        how = describe_end(worker.process.exitcode or 0, self.kills_before)
        if worker.run is None:
            self.false_starts += 1
            text = f"A training process ended before it could start, {how}."
            if self.false_starts > self.attempts.retries:
                raise ChildProcessError(f"{text} Free memory, or use the executor serial.")
            self.report(Notice(text=f"{text} Another takes its place."))
        elif (record := self.attempts.lose(worker.run, how)) is None:
            self.todo.appendleft(worker.run)
        else:
            yield record
        if self.todo:
            self.start_worker()


def describe_end(code: int, kills_before: int | None) -> str:
    """Describe how a process ended, as in "by SIGTERM".

    Args:
        code: Its exit code; negative for a signal in multiprocessing, 128 plus the signal's number in shells and
            workers.
        kills_before: `out_of_memory_kills()` when the runs began.
    """
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"with exit code {code}"
    if number != signal.SIGKILL:
        return f"by {name}"
    kills = out_of_memory_kills()
    if kills_before is None or kills is None:
        return f"by {name}, possibly for lack of memory"
    # The kernel does not tell which process it has killed.
    if kills > kills_before:
        return f"by {name}: since these runs began the kernel has killed a process for lack of memory"
    return f"by {name}, with no sign of a lack of memory"


def _send(pipe: Connection, message: Run | RunEvent | Record | None) -> None:
    """Send, ignoring a closed pipe."""
    with suppress(OSError):
        pipe.send(message)


def _run_worker(pipe: Connection, checkpoints: Path, checkpoint_seconds: float) -> None:
    """Send None when ready, then execute received runs until None is received or the pipe is closed."""
    # SIGTERM, which batch systems send to all processes of a job, stops a run like a message of the parent.
    with capture_signals() as captured:

        def stopping() -> bool:
            # During a run, the only message is the request to stop; a closed pipe also counts.
            return bool(captured) or pipe.poll()

        context = RunContext(
            folder=checkpoints, report=_Throttle(pipe).report, stopping=stopping, checkpoint_seconds=checkpoint_seconds
        )
        _send(pipe, None)
        while (run := _next_run(pipe, captured)) is not None:
            try:
                record = execute_run(run, context)
            except Interrupted:
                break
            _send(pipe, record)
    if captured:
        sys.exit(128 + captured[0])


def _next_run(pipe: Connection, captured: list[int]) -> Run | None:
    with suppress(EOFError, OSError):
        while not captured:
            if pipe.poll(_POLL_SECONDS):
                return pipe.recv()
    return None


@final
class _Throttle:
    """Sends progress a few times a second, and everything else at once."""

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
