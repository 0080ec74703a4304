"""The main job: train every variant under equal conditions, and keep a record of all that came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tidegate.lab.compare.cost import measure_costs
from tidegate.lab.compare.matching import matched_flops, matched_parameters, matched_time, num_parameters
from tidegate.lab.compare.presets import PRESETS, PresetName
from tidegate.lab.compare.tuning import chosen_rates, tuning_runs
from tidegate.lab.compare.variants import Variant
from tidegate.lab.models.curvature_and_gauge import measure_run
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.checkpoint import checkpoint_path, forget_checkpoint
from tidegate.lab.training.devices import require_device
from tidegate.lab.training.environment import environment
from tidegate.lab.training.events import Ended, Event, Phase
from tidegate.lab.training.executors.executor import Executor
from tidegate.lab.training.records import Costs, LayerMeasurements, Line, Match, Plan, Record, RecordFile
from tidegate.lab.training.run import Run, content_hash, run_label

CHECKPOINTS = "checkpoints"
"""The folder, beside the records, with the checkpoints of runs under way and of models still to be measured."""


class Failed(RuntimeError):  # noqa: N818, it tells of runs that failed
    """Runs ended with an error: their records hold the tracebacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to compare."""

    variants: tuple[Variant, ...]
    """The first is the control."""
    task: Task
    preset: PresetName = "tiny"
    num_seeds: int = 5
    budget: int | None = None
    """Tokens, or images, that the control is trained on; None takes the preset's."""
    match: Match = "tokens"
    tune_lr: bool = False
    device: str = "cpu"
    """Where models are trained, as PyTorch names it."""
    margin: float = 0.005
    """Differences below this share of the control's loss do not matter."""
    command: str = ""
    """What to type to get this again."""
    study: tuple[Run, ...] = ()
    """Runs that were made elsewhere; they take the place of all that the request would make."""

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ValueError(f"--seeds must be at least 1; got {self.num_seeds}. Three are needed for a verdict.")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"--tokens must be at least 1; got {self.budget}.")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"--margin must be a finite number of at least 0; got {self.margin}.")
        if len(self.variants) < 2:
            raise ValueError("A comparison needs at least two variants, the control first.")
        if self.tune_lr and (own := [variant.name for variant in self.variants if "lr" in variant.overrides]):
            raise ValueError(f"--tune-lr chooses learning rates that {', '.join(own)} has set. Leave one of them out.")
        _require_design(self.study)
        require_device(self.device)

    @property
    def control(self) -> Variant:
        """What the others are compared with."""
        return self.variants[0]


def records_path(folder: Path) -> Path:
    """Where a folder's records lie."""
    return folder / "records.jsonl"


def compare(request: Request, folder: Path, *, executor: Executor, tell: Callable[[Event], None]) -> list[Line]:
    """Do all runs that are not in the folder's records yet, and give all records.

    A second call with the same request goes on where the first stopped. A `ValueError` says that the folder holds
    another comparison; `Failed` that runs ended with an error, after all others were done.
    """
    base = base_runs(request)
    plan = plan_of(request, base)
    file = RecordFile(records_path(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with file.locked():
        lines = file.read()
        _require_same(lines, plan, folder)
        work = _Work(file=file, lines=lines, checkpoints=folder.absolute() / CHECKPOINTS, executor=executor, tell=tell)
        _compare(request, base, plan, work)
    return lines


def _compare(request: Request, base: dict[str, Run], plan: Plan, work: _Work) -> None:
    if not work.lines:
        work.append(plan)
    costs = _costs(base, plan, work)
    if request.tune_lr:
        base = _tuned(request, base, work)
    runs = list(request.study) or _designed(request, base, costs)
    # One model of each variant is measured: it takes seconds, and the page shows one of each.
    firsts = [run for run in runs if run.block == 0]
    work.do("comparing", runs, keep={run.id for run in firsts})
    _measure_layers(firsts, work)


def plan_of(request: Request, base: dict[str, Run]) -> Plan:
    """The first line of the records: all that decides numbers, and how to ask for it again."""
    data = request.task.load()
    variants = tuple(variant.plan() for variant in request.variants)
    decisive: dict[str, Any] = {
        "variants": [asdict(variant) for variant in variants],
        "base": [run.id for run in base.values()],
        "num_seeds": request.num_seeds,
        "match": request.match,
        "tune_lr": request.tune_lr,
        "margin": request.margin,
        "study": [run.id for run in request.study],
    }
    return Plan(
        command=request.command,
        variants=variants,
        control=request.control.name,
        num_seeds=request.num_seeds,
        match="study" if request.study else request.match,
        margin=request.margin,
        tuned_lr=request.tune_lr,
        task=data.facts,
        description=data.description,
        preset="study" if request.study else request.preset,
        budget=request.budget or PRESETS[request.task.kind][request.preset].budget,
        request=content_hash(decisive),
        environment=environment(),
    )


def base_runs(request: Request) -> dict[str, Run]:
    """One run of each variant, its first, as it would be if nothing were matched or tuned."""
    if request.study:
        return {run.variant: run for run in reversed(request.study)}
    data, preset = request.task.load(), PRESETS[request.task.kind][request.preset]
    training = preset.training(request.task, request.budget)
    runs = {
        variant.name: Run(
            variant=variant.name,
            block=0,
            seed=variant.first_seed,
            model=preset.model(request.task, data, variant.gates),
            task=request.task,
            training=replace(training, device=request.device, **variant.overrides),
        )
        for variant in request.variants
    }
    if request.match == "params":
        target = num_parameters(runs[request.control.name].model)
        runs = {name: replace(run, model=matched_parameters(run.model, target)) for name, run in runs.items()}
    return runs


def _require_design(runs: Sequence[Run]) -> None:
    """A study's runs are of one task, each once, and as many of each variant, in blocks counted from 0."""
    blocks: dict[str, list[int]] = {}
    for run in runs:
        blocks.setdefault(run.variant, []).append(run.block)
    if any(sorted(own) != list(range(len(runs) // len(blocks))) for own in blocks.values()):
        raise ValueError(f"A study has one run of each variant in each block, blocks counted from 0; got {blocks}.")
    if len({run.task for run in runs}) > 1 or any(run.role != "comparison" for run in runs):
        raise ValueError("A study's runs are of one task, and all have the role 'comparison'.")


def _designed(request: Request, base: dict[str, Run], costs: Costs) -> list[Run]:
    """Every variant under every seed, block by block, equal in what is to be matched."""
    control = base[request.control.name]
    if request.match == "flops":
        base = {name: matched_flops(run, control) for name, run in base.items()}
    if request.match == "time":
        ratios = {cost.variant: cost.time_ratio for cost in costs.items}
        base = {name: matched_time(run, control, time_ratio=ratios[name]) for name, run in base.items()}
    return [
        replace(run, block=block, seed=run.seed + block) for block in range(request.num_seeds) for run in base.values()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Where runs are done and recorded."""

    file: RecordFile
    lines: list[Line]
    """All that is in the file, which is read once."""
    checkpoints: Path
    executor: Executor
    tell: Callable[[Event], None]

    def append(self, line: Line) -> None:
        """Add a line to the file, and to the lines in memory once it is on the disk."""
        self.file.append(line)
        self.lines.append(line)

    def do(self, phase: str, runs: Sequence[Run], *, keep: Collection[str] = ()) -> list[Record]:
        """Return the records of these runs, running those that are missing.

        keep : ids of runs whose last checkpoint is still needed if they finish
        """
        done = _by_id(self.lines)
        missing = [run for run in runs if run.id not in done]
        self.tell(Phase(name=phase, num_runs=len(missing), num_done=len(runs) - len(missing)))
        failed: list[Record] = []
        for record in self.executor.execute(missing, checkpoints=self.checkpoints, report=self.tell):
            self.append(record)
            # Not before: until the record is on the disk, the checkpoint is all that there is of the run.
            if record.status != "finished" or record.id not in keep:
                forget_checkpoint(self.checkpoints, record.id)
            failed += [record] if record.status == "failed" else []
            self.tell(
                Ended(
                    run=record.id,
                    variant=run_label(record.run),
                    seed=record.run["seed"],
                    status=record.status,
                    loss=record.loss,
                )
            )
        if failed:
            names = ", ".join(f"{record.run['variant']} (seed {record.run['seed']})" for record in failed)
            last = failed[-1].error.strip().splitlines()[-1]
            raise Failed(f"{len(failed)} of {len(runs)} runs failed: {names}. The last said: {last}")
        done = _by_id(self.lines)
        return [done[run.id] for run in runs]


def _by_id(lines: Sequence[Line]) -> dict[str, Record]:
    """Every run that need not be done again: it ended, in a number or in divergence."""
    return {line.id: line for line in lines if isinstance(line, Record) and line.status != "failed"}


def _costs(base: dict[str, Run], plan: Plan, work: _Work) -> Costs:
    """The costs on record, or new ones: measured once, since matching by time rests on them."""
    for line in work.lines:
        if isinstance(line, Costs):
            return line
    work.tell(Phase(name="measuring costs", num_runs=0))
    costs = measure_costs(base, control=plan.control, request=plan.request)
    work.append(costs)
    return costs


def _measure_layers(runs: Sequence[Run], work: _Work) -> None:
    """Measure the trained models of these runs, those that are not measured yet, and forget their checkpoints."""
    measured = {line.id for line in work.lines if isinstance(line, LayerMeasurements)}
    finished = {record.id for record in _by_id(work.lines).values() if record.status == "finished"}
    missing = [run for run in runs if run.id in finished - measured]
    if missing:
        work.tell(Phase(name="measuring layers", num_runs=0))
    for run in missing:
        work.append(measure_run(run, checkpoint_path(work.checkpoints, run.id)))
    for run in runs:
        forget_checkpoint(work.checkpoints, run.id)


def _tuned(request: Request, base: dict[str, Run], work: _Work) -> dict[str, Run]:
    """The runs, each with the learning rate that did best for its variant on seeds that the comparison does not use."""
    trials = tuning_runs(base, num_seeds=request.num_seeds)
    rates = chosen_rates(work.do("tuning learning rates", trials))
    return {name: replace(run, training=replace(run.training, lr=rates[name])) for name, run in base.items()}


def _require_same(lines: Sequence[Line], plan: Plan, folder: Path) -> None:
    """A folder holds one comparison."""
    for line in lines:
        if isinstance(line, Plan) and line.request != plan.request:
            raise ValueError(
                f"{folder} holds another comparison: {line.command or line.request}. Choose another folder with --out, "
                "or remove that one."
            )
        if isinstance(line, Plan) and (changed := _changed(line.environment, plan.environment)):
            raise ValueError(
                f"{folder} was begun elsewhere ({changed}), so that its numbers would not go together with new ones. "
                "Choose another folder with --out."
            )


def _changed(before: dict[str, str], now: dict[str, str]) -> str:
    differing = [f"{name} {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value]
    return ", ".join(differing)
