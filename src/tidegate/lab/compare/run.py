"""Train every variant under equal conditions and record every run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate._files import remove_partial_files
from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.lab.compare.cost import measure_costs
from tidegate.lab.compare.design import base_runs, design_runs, make_plan, match_steps
from tidegate.lab.compare.forecast import forecast
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.tuning import Setting, choose_settings, next_trials, num_trials
from tidegate.lab.models.measure import measure_run
from tidegate.lab.training.checkpoint import forget_checkpoint, has_checkpoint, remove_if_empty
from tidegate.lab.training.events import Ended, Event, Notice, Phase
from tidegate.lab.training.executors.executor import Executor
from tidegate.lab.training.records import (
    Costs,
    LayerMeasurements,
    Line,
    Plan,
    Record,
    RecordFile,
    last_costs,
    records_path,
)
from tidegate.lab.training.run import Run

CHECKPOINTS = "checkpoints"
"""Folder beside the records, for checkpoints of unfinished runs and of models that are not measured yet."""


class RunsFailedError(RuntimeError):
    """Runs failed with an error; their records have the tracebacks."""


def compare(request: Request, folder: Path, *, executor: Executor, on_event: Callable[[Event], None]) -> list[Line]:
    """Execute all runs and measurements that are not on record in the folder, and return all of its lines.

    A second call with the same request resumes where the first stopped.

    Raises:
        InputError: The folder holds another comparison.
        RunsFailedError: Runs failed; all others were executed before.
    """
    base = base_runs(request)
    plan = make_plan(request, base)
    file = RecordFile(records_path(folder))
    if not file.path.exists():
        # Before anything is written or measured. A resumed comparison may have no runs left.
        executor.require(list(base.values()))
    folder.mkdir(parents=True, exist_ok=True)
    with file.lock():
        lines = file.read()
        _check_same(lines, plan, folder)
        remove_partial_files(folder / CHECKPOINTS)
        work = _Work(
            file=file, lines=lines, checkpoints=folder.absolute() / CHECKPOINTS, executor=executor, on_event=on_event
        )
        _compare(request, base, plan, work)
    return lines


def _compare(request: Request, base: dict[str, Run], plan: Plan, work: _Work) -> None:
    # A user may have removed the line of the plan because it was damaged.
    if not any(isinstance(line, Plan) for line in work.lines):
        work.append(plan)
    costs = _costs(base, plan, work)
    base = match_steps(request, base, costs)
    if not any(isinstance(line, Record) for line in work.lines):
        work.on_event(Notice(text=forecast(request, base, costs)))
    chosen: dict[tuple[str, int], Setting] = {}
    if request.grid is not None:
        tried: list[Record] = []
        num_runs = request.num_seeds * len(base) * (num_trials(request.grid) + 1)
        while trials := next_trials(base, request.grid, num_seeds=request.num_seeds, done=tried):
            phase = "tuning" if request.grid.chooses else "mapping"
            tried += work.run_missing(phase, trials, num_later=num_runs - len(tried) - len(trials))
        chosen = choose_settings(tried) if request.grid.chooses else {}
    runs = list(request.runs) or design_runs(base, num_seeds=request.num_seeds, chosen=chosen)
    # The layers of one model per variant are measured.
    firsts = [run for run in runs if run.block == 0]
    before = {line.id for line in work.lines if isinstance(line, Record)}
    work.run_missing("comparing", runs, keep={run.id for run in firsts})
    _measure_layers(firsts, before, work)
    remove_if_empty(work.checkpoints)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The records of a running comparison, and its executor."""

    file: RecordFile
    lines: list[Line]
    """All lines of the file, which is read once."""
    checkpoints: Path
    executor: Executor
    on_event: Callable[[Event], None]

    def append(self, line: Line) -> None:
        """Append a line to the file and then to the lines in memory."""
        self.file.append(line)
        self.lines.append(line)

    def run_missing(
        self, phase: str, runs: Sequence[Run], *, keep: Collection[str] = (), num_later: int = 0
    ) -> list[Record]:
        """Return the records of a phase's runs, after executing the missing ones.

        `keep` has the ids of runs whose last checkpoint is needed after they finish, `num_later` is the number of runs
        of later phases.
        """
        done, repeated = _ended_records(self.lines), _repeated(runs)
        known = done.keys() | repeated.keys()
        missing = [run for run in runs if run.id not in known]
        # A command that was killed right after writing a record leaves the checkpoints of that run.
        for run in runs:
            if run.id in done and run.id not in keep:
                forget_checkpoint(self.checkpoints, run.id)
        num_done = len(runs) - len(missing)
        self.on_event(Phase(name=phase, num_runs=len(missing), num_done=num_done, num_later=num_later))
        failed: list[Record] = []
        for record in self.executor.execute(missing, checkpoints=self.checkpoints, report=self.on_event):
            self.append(record)
            # Delete the checkpoint only after the record is on disk; a failed run resumes from it.
            if record.status == "diverged" or (record.status == "finished" and record.id not in keep):
                forget_checkpoint(self.checkpoints, record.id)
            failed += [record] if record.status == "failed" else []
            self.on_event(
                Ended(
                    run=record.id,
                    variant=record.run.label,
                    seed=record.run.seed,
                    status=record.status,
                    loss=record.loss,
                )
            )
        if failed:
            names = ", ".join(f"{record.run.variant} (seed {record.run.seed})" for record in failed)
            last = failed[-1].error.strip().splitlines()[-1]
            raise RunsFailedError(f"{len(failed)} of {len(runs)} runs failed: {names}. The last error: {last}")
        done = _ended_records(self.lines)
        for run in runs:
            if run.id not in done:
                done[run.id] = replace(done[repeated[run.id]], id=run.id, run=run, timing=None)
                self.append(done[run.id])
        return [done[run.id] for run in runs]


def _repeated(runs: Sequence[Run]) -> dict[str, str]:
    """Return the ids of runs with identity gates, each with the id of the same run without these gates."""
    unnamed = {replace(run, variant="").id: run.id for run in runs}
    found: dict[str, str] = {}
    for run in runs:
        gates = Gates.parse(run.model.gate)
        acting = Gates(gate for gate in gates if not gate.is_identity)
        bare = replace(run, variant="", model=replace(run.model, gate=str(acting)))
        if acting != gates and bare.id in unnamed:
            found[run.id] = unnamed[bare.id]
    return found


def _ended_records(lines: Sequence[Line]) -> dict[str, Record]:
    """Return the records of finished and diverged runs by id; failed runs are repeated."""
    return {line.id: line for line in lines if isinstance(line, Record) and line.status != "failed"}


def _costs(base: dict[str, Run], plan: Plan, work: _Work) -> Costs:
    """Return the costs on record, or measure them. They are measured once, since matching by time depends on them."""
    if (recorded := last_costs(work.lines)) is not None:
        return recorded
    compared = [record for record in _ended_records(work.lines).values() if record.run.role == "comparison"]
    if plan.match == "time" and compared:
        expected = "a folder with the recorded costs, which determine the lengths of its runs"
        raise InputError("out", expected=expected, got=work.file.path.parent, hint="Choose another folder.")
    work.on_event(Phase(name="measuring costs", num_runs=0))
    costs = measure_costs(base, control=plan.control, request=plan.request)
    work.append(costs)
    return costs


def _measure_layers(runs: Sequence[Run], before: Collection[str], work: _Work) -> None:
    """Measure the trained models of these runs that are not measured yet, and delete their checkpoints.

    `runs` has the first run of each variant. If a user removed a damaged line of measurements, the run is trained
    again, which gives the same model; its record stays. `before` has the ids of runs on record when the command began:
    checkpoints of later runs exist, or are out of reach.
    """
    measured = {line.id: line for line in work.lines if isinstance(line, LayerMeasurements)}
    repeated = _repeated(runs)
    finished = {record.id for record in _ended_records(work.lines).values() if record.status == "finished"}
    missing = [run for run in runs if run.id in finished - measured.keys() - repeated.keys()]
    lost = [run for run in missing if run.id in before and not has_checkpoint(work.checkpoints, run.id)]
    if lost:
        work.on_event(Phase(name="retraining models to measure", num_runs=len(lost)))
        for _ in work.executor.execute(lost, checkpoints=work.checkpoints, report=work.on_event):
            pass
    if missing:
        work.on_event(Phase(name="measuring layers", num_runs=0))
    for run in missing:
        measured[run.id] = measure_run(run, work.checkpoints)
        work.append(measured[run.id])
    for own, other in repeated.items():
        if other in measured and own not in measured:
            work.append(replace(measured[other], id=own))
    for run in runs:
        forget_checkpoint(work.checkpoints, run.id)


def _check_same(lines: Sequence[Line], plan: Plan, folder: Path) -> None:
    """Raise InputError if the folder holds another comparison, or the same from another machine or version."""
    for line in lines:
        if isinstance(line, Plan | Costs) and line.request != plan.request:
            other = (line.command if isinstance(line, Plan) else "") or line.request
            hint = f"It holds {other}. Choose another folder, or remove this one."
            raise InputError("out", expected="a folder without another comparison", got=folder, hint=hint)
        if isinstance(line, Plan):
            before, now = line.environment, plan.environment
            changed = [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
            if changed:
                expected = "a folder of runs that are comparable with new ones"
                hint = f"Changed since: {', '.join(changed)}. Choose another folder."
                raise InputError("out", expected=expected, got=folder, hint=hint)
