"""Execute runs on a Ray cluster, each in one process or in several that Ray Train starts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate._validation import InputError
from tidegate.lab.training.events import Interrupted, Notice, Progress, RunEvent, ignore
from tidegate.lab.training.executors.executor import (
    RETRIES,
    Attempts,
    RunResources,
    capture_signals,
    describe_resources,
)
from tidegate.lab.training.machine import environment
from tidegate.lab.training.parallel import Processes, is_lost_peer
from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import CHECKPOINT_SECONDS, RunContext, execute_run

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0


@final
@dataclass(frozen=True)
class RayExecutor:
    """Executes runs as Ray tasks: on the cluster at `RAY_ADDRESS`, or on this machine.

    All machines should share the folder of checkpoints. Otherwise a stopped run starts over, with the same results, and
    the layers of trained models are not measured; runs of several processes require it. A run that loses a process
    resumes as with `ProcessExecutor`. Ray's own retries are turned off: they give no reason, and are unlimited when
    memory is short.
    """

    resources: RunResources = field(default_factory=RunResources)
    retries: int = RETRIES
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def require(self, runs: Sequence[Run]) -> None:
        """See `Executor`. The cluster must have room for each run when this is called."""
        for run in runs:
            self.resources.require(run)
        _connect()
        machines = _machines()
        for run in runs:
            if not self.resources.num_places(run, machines):
                has = ", ".join(
                    f"{count} × {kind}" for kind, count in Counter(map(describe_resources, machines)).items()
                )
                raise InputError(
                    "resources",
                    expected="within the resources of the cluster's machines",
                    hint=f"Ray has no room for a run of {self.resources.describe(run)}: its machines have {has}. Ask "
                    "for less, or add machines before you start.",
                )

    def execute(
        self, runs: Sequence[Run], *, checkpoints: Path, report: Callable[[RunEvent], None]
    ) -> Iterator[Record]:
        """See `Executor`."""
        if not runs:
            return
        self.require(runs)
        tasks = _Tasks(runs, checkpoints, self, report)
        with capture_signals() as captured:
            while tasks.submit() or tasks.pending:
                if captured:
                    tasks.stop()
                yield from tasks.take_done()
        if captured:
            raise KeyboardInterrupt


@final
class _Tasks:
    """The submitted tasks and their runs."""

    def __init__(
        self, runs: Sequence[Run], checkpoints: Path, executor: RayExecutor, report: Callable[[RunEvent], None]
    ) -> None:
        self.pending: dict[Any, Run] = {}
        self._queue = deque(runs)
        self._report = report
        self._attempts = Attempts(executor.retries, report)
        self._resources = executor.resources
        # The board is on the machine of this command, so that it answers when another machine leaves.
        here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        # If it is killed, it restarts, and its callers ask again.
        board: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(_Board)
        self._board: Any = board.remote()
        self._work = _Work(str(checkpoints), self._board, executor.resources, executor.checkpoint_seconds)
        self._task: Any = ray.remote(max_retries=0)(_run_alone if executor.resources.processes == 1 else _run_together)
        self._stopped = False

    def submit(self) -> int:
        """Submit the runs that wait; return how many still do.

        Ray queues runs of one process. A run of several processes has another process that waits for them, so only as
        many are submitted as the cluster has room for.
        """
        alone = self._resources.processes == 1
        while self._queue:
            run = self._queue.popleft()
            if not alone and len(self.pending) >= max(1, self._resources.num_places(run, _machines())):
                self._queue.appendleft(run)
                break
            # Several processes have their own cores, which Ray Train asks for.
            needs = self._resources.of_process(run) if alone else {"CPU": 0, "GPU": 0}
            # Ray's own lists show the name, and so does the title of the process.
            task = self._task.options(
                name=f"{run.label}, seed {run.seed}", num_cpus=needs["CPU"], num_gpus=needs["GPU"]
            )
            self.pending[task.remote(run, self._work)] = run
        return len(self._queue)

    def stop(self) -> None:
        """Ask every run to save and end; drop runs that have not started."""
        begun = ray.get(self._board.stop.remote())
        if self._stopped:
            return
        self._stopped = True
        self._queue.clear()
        for reference in [reference for reference, run in self.pending.items() if run.id not in begun]:
            del self.pending[reference]
            ray.cancel(reference, force=True)

    def take_done(self) -> Iterator[Record]:
        """Wait a moment, report posted events, and yield the records of runs that ended; queue lost runs again."""
        done: list[Any] = ray.wait(list(self.pending), timeout=_POLL_SECONDS)[0] if self.pending else []
        for event in ray.get(self._board.read.remote()):
            self._report(event)
        for reference in done:
            run = self.pending.pop(reference)
            outcome = _outcome(reference, run)
            if isinstance(outcome, str):
                outcome = self._lose(run, outcome)
            if outcome is not None:
                yield outcome

    def _lose(self, run: Run, how: str) -> Record | None:
        self._board.leave.remote(run.id)
        if self._stopped:
            return None
        record = self._attempts.lose(run, how)
        if record is None:
            self._queue.appendleft(run)
            if not self._resources.num_places(run, _machines()):
                text = (
                    f"No machine that is left has {self._resources.describe(run)}: the run waits until one joins the "
                    "cluster."
                )
                self._report(Notice(text=text, run=run.id, variant=run.label, seed=run.seed))
        return record


@dataclass(frozen=True, slots=True)
class _Work:
    """The arguments of a task besides its run."""

    checkpoints: str
    board: Any
    resources: RunResources
    checkpoint_seconds: float


@final
class _Board:
    """An actor that receives the events of tasks, and replies whether to stop."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []
        self._latest: dict[str, Progress] = {}
        self._begun: set[str] = set()
        self._failed: dict[str, Record] = {}
        self._stopped = False

    def begin(self, run: str) -> bool:
        """Note that a run starts; return whether it is to stop."""
        self._begun.add(run)
        return self._stopped

    def leave(self, run: str) -> None:
        """Note that a run has lost its process and waits."""
        self._begun.discard(run)

    def post(self, event: RunEvent) -> bool:
        """Keep an event; return whether the task is to stop."""
        self._begun.add(event.run)
        if isinstance(event, Progress):
            self._latest[event.run] = event
        else:
            self._notices.append(event)
        return self._stopped

    def read(self) -> list[RunEvent]:
        """Return the events since the last call: every notice, and the latest progress of each run."""
        posted = [*self._notices, *self._latest.values()]
        self._notices, self._latest = [], {}
        return posted

    def fail(self, record: Record) -> None:
        """Keep the record of a run that failed by itself, in one of its processes."""
        self._failed[record.id] = record

    def take_failed(self, run: str) -> Record | None:
        """Return the record of a run that failed by itself; None if it did not."""
        return self._failed.pop(run, None)

    def stop(self) -> set[str]:
        """Ask every task to stop; return the runs that have started."""
        self._stopped = True
        return self._begun


@final
class _Reporter:
    """Posts a run's progress to the board now and then, and keeps its answer whether to stop."""

    def __init__(self, board: Any, run: Run) -> None:
        self._board = board
        self._posted = 0.0
        self.stopped = bool(ray.get(board.begin.remote(run.id)))

    def report(self, event: RunEvent) -> None:
        is_due = time.monotonic() - self._posted > _POLL_SECONDS
        if is_due or not isinstance(event, Progress) or event.step == event.steps:
            self._posted = time.monotonic()
            self.stopped = bool(ray.get(self._board.post.remote(event)))


def _run_alone(run: Run, work: _Work) -> Record | None:
    """Execute a run in this process; return None if it was stopped."""
    reporter = _Reporter(work.board, run)
    return None if reporter.stopped else _execute(run, work, reporter, None)


def _run_together(run: Run, work: _Work) -> Record | str | None:
    """Execute a run in several processes that Ray Train starts; None if it was stopped, a text if one was killed."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _do_part,
        train_loop_config={"run": run, "work": work},
        scaling_config=ScalingConfig(
            num_workers=work.resources.processes,
            use_gpu=work.resources.gpus > 0,
            resources_per_worker={name: count for name, count in work.resources.of_process(run).items() if count},
        ),
        run_config=RunConfig(
            # Removed together with the run's checkpoints.
            name=f"{run.id}.ray-{secrets.token_hex(4)}",
            storage_path=work.checkpoints,
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        return trainer.fit().return_value
    except TrainingFailedError:
        failed: Any = ray.get(work.board.take_failed.remote(run.id))
        how = f"one of {work.resources.processes}, by a signal or a crash, possibly for lack of memory"
        return failed or how


def _do_part(config: dict[str, Any]) -> Record | None:
    """Execute one process's part of a run; the first returns the record, or None if the run was stopped."""
    run, work = config["run"], config["work"]
    processes = Processes("ddp", run.training.device)
    try:
        record = _execute(run, work, _Reporter(work.board, run) if processes.is_first else None, processes)
    finally:
        processes.close()
    if record is not None and record.status == "failed":
        if not is_lost_peer(record.error):
            ray.get(work.board.fail.remote(record))
        # Returned, it would leave the other processes waiting for this one.
        raise RuntimeError(record.error)
    return record


def _execute(run: Run, work: _Work, reporter: _Reporter | None, processes: Processes | None) -> Record | None:
    context = RunContext(
        folder=Path(work.checkpoints),
        report=ignore if reporter is None else reporter.report,
        stopping=lambda: reporter is not None and reporter.stopped,
        checkpoint_seconds=work.checkpoint_seconds,
        num_threads=work.resources.threads,
        processes=processes,
    )
    try:
        return execute_run(run, context)
    except Interrupted:
        return None


def _outcome(reference: Any, run: Run) -> Record | str | None:
    """Return a task's record, None if it was stopped, or a text that describes how its process was lost."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as problem:
        return Record(id=run.id, run=run, status="failed", error=str(problem), environment=environment())
    except ray.exceptions.OutOfMemoryError:
        return "by Ray for lack of memory"
    except ray.exceptions.WorkerCrashedError:
        return "by a signal or a crash, possibly for lack of memory"
    except ray.exceptions.NodeDiedError:
        return "with its machine, which left the cluster"
    except ray.exceptions.RayError as problem:
        return f"by {type(problem).__name__} of Ray"


def _connect() -> None:
    """Join the cluster that `RAY_ADDRESS` names or that runs on this machine, or start one here."""
    if not ray.is_initialized():
        _require_answer(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        # Otherwise its connections would wait for a lost cluster at exit.
        except Exception as problem:
            ray.shutdown()
            # Ray raises plain exceptions here, after thirty seconds.
            raise ConnectionError(
                f"Ray cannot be started or joined: {problem} Try again when this machine has less to do, or join a "
                "cluster that runs: ray start --head, and RAY_ADDRESS."
            ) from problem
        except BaseException:
            ray.shutdown()
            raise


def _require_answer(address: str) -> None:
    """Raise ConnectionError if nothing listens at an address, where Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as problem:
        raise ConnectionError(
            f"no Ray cluster answers at RAY_ADDRESS {address}: {problem}. Start it with ray start --head, or unset "
            "RAY_ADDRESS to use only this machine."
        ) from problem


def _machines() -> list[dict[str, float]]:
    """Return the total resources of each machine of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
