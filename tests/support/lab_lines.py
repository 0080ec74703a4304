"""The lines of miniature comparisons, their runs done in a fraction of a second."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from lab_runs import COARSE, cost_of, with_run

from tidegate.lab.compare.page import comparison_page
from tidegate.lab.compare.presets import Preset
from tidegate.lab.compare.summary import summarise
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.models import measure
from tidegate.lab.models.measure import measure_run
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import TaskFacts
from tidegate.lab.training.records import Costs, Plan, Record
from tidegate.lab.training.run import Run
from tidegate.lab.training.train import RunContext, execute_run

SIZE = Preset(d_model=16, num_layers=2, num_heads=2, batch_size=4, budget=1, lr=1e-2)


def lines_of(task, variants="none,bma", *, num_seeds=3, size=SIZE, command="tidegate compare", **training):
    """A plan, costs that are made up, and a record of each variant under each seed."""
    parsed, data = parse_variants(variants), task.load()
    options = {"steps": 8, "num_evaluations": 4, "num_observations": 2} | training
    runs = [
        Run(
            variant=variant.name,
            block=block,
            seed=variant.overrides.get("first_seed", 0) + block,
            model=size.model(task, data, variant.gates),
            task=task,
            training=replace(size.training(task), **options),
        )
        for block in range(num_seeds)
        for variant in parsed
    ]
    plan = Plan(
        command=command,
        variants=parsed,
        control=parsed[0].name,
        num_seeds=num_seeds,
        match="tokens",
        margin=0.005,
        grid=None,
        task=TaskFacts.from_dict(data.facts),
        description=data.description,
        preset="tiny",
        budget=1,
        request="",
        environment={},
    )
    costs = Costs(request="", items=tuple(cost_of(variant.name) for variant in parsed), environment={})
    return [plan, costs, *executed_and_measured(runs)]


def executed_and_measured(runs):
    """A record of each run, then the measurements of the models of the first block."""
    with TemporaryDirectory() as place, patch.object(measure, "_SAMPLING", COARSE):
        folder = Path(place)
        records = [execute_run(run, RunContext(folder=folder)) for run in runs]
        return records + [measure_run(run, folder) for run in runs if run.block == 0]


@cache
def recall_lines():
    """A miniature of recall under one seed."""
    return tuple(lines_of(RecallTask(num_pairs=2, num_keys=8, num_values=4), num_seeds=1, batch_size=16))


def page_of(lines):
    """The page of a comparison's lines."""
    return comparison_page(summarise(lines))


def replanned(lines, **changes):
    """The lines, with another plan."""
    return [replace(line, **changes) if isinstance(line, Plan) else line for line in lines]


def with_seeds(lines, number):
    """The lines of the first blocks alone."""
    kept = [line for line in lines if line.kind != "run" or line.run.block < number]
    return replanned(kept, num_seeds=number)


def diverged(record):
    """The record as it would be, had its run diverged halfway."""
    half = record.curve[: len(record.curve) // 2]
    return replace(
        record,
        status="diverged",
        loss=None,
        metrics={},
        tokens=half[-1].tokens,
        flops=half[-1].flops,
        curve=half,
        timing=replace(record.timing, seconds=record.timing.seconds[: len(half)]),
        observations=(),
        loss_by_position=(),
        error="The loss or its gradient was no longer finite.",
    )


def everywhere(lines, change, *, variants=("none", "g1", "bma-query")):
    """The lines, with a change of every record of some variants."""
    return [change(line) if isinstance(line, Record) and line.run.variant in variants else line for line in lines]


def with_curve(*shares):
    """A curve that ends with these losses, as shares of the first, evenly spread over the training."""

    def change(record):
        point, number = record.curve[0], len(shares)
        curve = (replace(point, tokens=record.tokens * (n + 1) // number, loss=share) for n, share in enumerate(shares))
        return replace(record, curve=tuple(curve))

    return change


def with_trials(lines, grid, loss):
    """The lines, with a trial of every variant in every block at each point of a grid.

    loss : of variant, block, rate and start; None if the trial diverged, "not tried" if there was none
    """
    trials = []
    for record in [line for line in lines if line.kind == "run"]:
        run = record.run
        for rate, start in ((rate, start) for rate in grid.rates for start in grid.starts):
            found = loss(run.variant, run.block, rate, start)
            if found == "not tried":
                continue
            tried = with_run(record, role="tuning", training={"lr": run.training.lr * rate}, model={"init": start})
            name = f"{record.id}-{rate}-{start}"
            trials.append(replace(diverged(tried) if found is None else tried, id=name, loss=found))
    return [*lines, *trials]
