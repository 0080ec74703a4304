"""Runs side by side, each in a process with threads of its own: the way to use all cores while models are small."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event as StopEvent
from pathlib import Path
from typing import Any, final

from tidegate.lab.environment import environment
from tidegate.lab.events import Interrupted, Progress
from tidegate.lab.executors.serial import noted_interrupt
from tidegate.lab.records import Record
from tidegate.lab.run import Run
from tidegate.lab.train import Surroundings, execute_run

__all__ = ["ProcessExecutor"]

# A process that was forked from one that has used PyTorch's threads may hang.
_context = multiprocessing.get_context("spawn")

_POLL_SECONDS = 0.2


@final
class ProcessExecutor:
    """Does runs in as many processes as have cores for their threads, unless told how many."""

    def __init__(self, num_processes: int | None = None) -> None:
        self.num_processes = num_processes

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[Progress], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        todo: Queue[Run | None] = _context.Queue()
        told: Queue[Any] = _context.Queue()
        stop = _context.Event()
        threads = max(run.training.num_threads for run in runs)
        num_workers = min(self.num_processes or max(1, len(os.sched_getaffinity(0)) // threads), len(runs))
        # After a stop nobody reads what is left to do, and the end of this process must not wait for that.
        todo.cancel_join_thread()
        for item in (*runs, *[None] * num_workers):
            todo.put(item)
        with noted_interrupt() as interrupted:
            workers = _started(num_workers, (todo, told, stop, checkpoints))
            try:
                yield from _records(workers, told, report, stop, interrupted, num_runs=len(runs))
            finally:
                stop.set()
                _end(workers, told)
        if interrupted:
            raise KeyboardInterrupt


def _started(number: int, arguments: tuple[Any, ...]) -> list[SpawnProcess]:
    """Workers. A terminal sends Ctrl-C to them too; they inherit that it is held back, from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        workers = [_context.Process(target=_work, args=arguments, daemon=True) for _ in range(number)]
        for worker in workers:
            worker.start()
        return workers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _records(
    workers: list[SpawnProcess],
    told: Queue[Any],
    report: Callable[[Progress], None],
    stop: StopEvent,
    interrupted: list[int],
    *,
    num_runs: int,
) -> Iterator[Record]:
    """What the workers tell, until every run has its record or all have stopped."""
    num_left, under_way = num_runs, dict[int, Run]()
    while num_left:
        if interrupted:
            stop.set()
        # Asked before reading: all that a worker told before it ended is there to be read by then.
        working = any(worker.is_alive() for worker in workers)
        try:
            message = told.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            for worker in workers:
                if worker.exitcode and (run := under_way.pop(worker.pid or 0, None)) is not None:
                    num_left -= 1
                    yield _lost(run, worker.exitcode)
            if working:
                continue
            if interrupted:
                return
            codes = sorted({worker.exitcode for worker in workers if worker.exitcode})
            raise RuntimeError(
                f"The training processes ended before their work was done; exit codes {codes}."
            ) from None
        match message:
            case int(worker), Run() as run:
                under_way[worker] = run
            case Record():
                num_left -= 1
                under_way = {worker: run for worker, run in under_way.items() if run.id != message.id}
                yield message
            case _:
                report(message)


def _lost(run: Run, code: int) -> Record:
    """The record of a run whose process was ended by somebody else."""
    how = f"signal {-code}; if it was 9, the machine may have been out of memory" if code < 0 else f"exit code {code}"
    error = f"The process of this run was ended from outside: {how}."
    return Record(id=run.id, run=run.to_dict(), status="failed", error=error, environment=environment())


def _end(workers: list[SpawnProcess], told: Queue[Any]) -> None:
    """Wait for the workers, which stop at their next step; what they still tell must be read, or they wait for that."""
    while any(worker.is_alive() for worker in workers):
        try:
            told.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
    for worker in workers:
        worker.join()


def _work(todo: Queue[Run | None], told: Queue[Any], stop: StopEvent, checkpoints: Path) -> None:
    """One worker: takes runs until there are none left. Ctrl-C reaches it through `stop`."""
    parent = multiprocessing.parent_process()
    throttle = _Throttle(told)

    def orphaned() -> bool:
        return parent is not None and not parent.is_alive()

    def stopping() -> bool:
        # Without its parent a worker would train on for nobody.
        return stop.is_set() or orphaned()

    try:
        while not stopping() and (run := todo.get()) is not None:
            told.put((os.getpid(), run))
            told.put(execute_run(run, Surroundings(folder=checkpoints, report=throttle.report, stopping=stopping)))
    except Interrupted:
        pass
    if orphaned():
        # Nor would anybody read what it still has to tell.
        told.cancel_join_thread()


@final
class _Throttle:
    """Passes progress on a few times a second: nobody reads faster."""

    def __init__(self, told: Queue[Any]) -> None:
        self.told = told
        self.last = 0.0

    def report(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last > _POLL_SECONDS or progress.step == progress.steps:
            self.last = now
            self.told.put(progress)
