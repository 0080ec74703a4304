"""Shared parts of all executors: interface, resources of a run, lost processes, signals; and the serial executor."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, TypeAlias, final, get_args

from tidegate._validation import InputError, require_choice, require_size
from tidegate.lab.training.events import Interrupted, Notice, RunEvent
from tidegate.lab.training.machine import environment
from tidegate.lab.training.parallel import require_parallel
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import CHECKPOINT_SECONDS, RunContext, execute_run

ExecutorName: TypeAlias = Literal["serial", "processes", "ray"]
RETRIES = 2
"""Default number of times that a run is resumed after it lost its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResources:
    """The resources that are reserved for each run."""

    cpus: int | None = None
    """Number of cores and threads; None is the run's number of threads for each process."""
    gpus: int = 0
    """Number of CUDA devices: 0, or one per process."""
    processes: int = 1
    """Number of processes, which share the rows of each batch."""

    def __post_init__(self) -> None:
        require_size("processes", self.processes)
        require_size("cpus", self.cpus, optional=True)
        if self.cpus is not None and self.cpus % self.processes:
            raise InputError("cpus", expected=f"a multiple of processes={self.processes}", got=self.cpus)
        if isinstance(self.gpus, bool) or self.gpus not in (0, self.processes):
            raise InputError("gpus", expected=f"0 or processes={self.processes}", got=self.gpus)

    @property
    def threads(self) -> int | None:
        """Threads per process; None takes the run's."""
        return None if self.cpus is None else self.cpus // self.processes

    def of_process(self, run: Run) -> dict[str, int]:
        """Return the resources of each process of a run, by Ray's names."""
        return {"CPU": self.threads or run.training.num_threads, "GPU": self.gpus // self.processes}

    def require(self, run: Run) -> None:
        """Raise InputError for a run that cannot use these resources."""
        device = run.training.device
        if self.gpus and device != "cuda":
            hint = "Use the device cuda; Ray chooses the GPU."
            raise InputError("gpus", expected=f"0 for runs on {device}", got=self.gpus, hint=hint)
        if device.startswith("cuda") and not self.gpus:
            hint = "Ray hides GPUs from runs that do not reserve them."
            raise InputError("gpus", expected=f"at least 1 for runs on {device}", got=0, hint=hint)
        if self.processes > 1:
            require_parallel(run, "ddp", self.processes)

    def num_places(self, run: Run, machines: Iterable[Mapping[str, float]]) -> int:
        """Return how many runs like this one fit at once: one process on one machine, several on any.

        `machines` has the total resources of each machine, by Ray's names.
        """
        needs = {name: count for name, count in self.of_process(run).items() if count}
        places = [min(int(machine.get(name, 0) // count) for name, count in needs.items()) for machine in machines]
        return sum(places) // self.processes

    def describe(self, run: Run) -> str:
        """Describe the resources of a run."""
        needs = describe_resources({name: self.processes * count for name, count in self.of_process(run).items()})
        return f"{needs}, in {self.processes} processes" if self.processes > 1 else needs


def describe_resources(counts: Mapping[str, float]) -> str:
    """Describe cores and GPUs, given by Ray's names."""
    cpus, gpus = counts.get("CPU", 0), counts.get("GPU", 0)
    devices = f" and {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else ""
    return f"{cpus:g} core{'' if cpus == 1 else 's'}{devices}"


class Executor(Protocol):
    """Executes runs. The choice of the executor affects only the timing of a record."""

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

    A run is resumed up to `retries` times after it lost its process, before it has failed; a serial run has no process
    of its own. Ray reserves the resources for each run; other executors take none.
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
        """Count a process that ended, such as "by SIGKILL". Return the failed record, or None for a retry.

        A retry gives a notice.
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
    """Collect the numbers of SIGINT and SIGTERM in a list, without interrupting the process."""
    captured: list[int] = []

    def capture(number: int, _frame: FrameType | None) -> None:
        captured.append(number)

    before = {number: signal.signal(number, capture) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield captured
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
