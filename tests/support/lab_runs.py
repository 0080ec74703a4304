"""Miniature runs and comparisons: real ones, that take a fraction of a second."""

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from tidegate.config import TransformerConfig
from tidegate.lab.compare import run as compare_module
from tidegate.lab.compare.presets import PRESETS, Preset
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.run import compare
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.models import measure
from tidegate.lab.tasks.task import TaskFacts
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.executors.executor import make_executor
from tidegate.lab.training.executors.processes import ProcessExecutor
from tidegate.lab.training.measurements import Sampling
from tidegate.lab.training.records import Cost, Costs, LayerMeasurements, Record
from tidegate.lab.training.run import Run, Training
from tidegate.lab.training.train import RunContext, execute_run

LENGTH = 16
STEPS = 12
MINIATURE = Preset(
    d_model=16, num_layers=2, num_heads=2, length=LENGTH, batch_size=4, budget=LENGTH * 4 * STEPS, lr=1e-2
)
COARSE = Sampling(num_positions=1, num_planes=2)
"""For curvature whose values do not matter."""
LINES = [f"{number}: the sum of {number} and {number % 7} is {number + number % 7}.\n" for number in range(200)]


class Deadly(str):
    """A name that ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (7,)


def write_text(folder):
    path = folder / "sums.txt"
    # Another process may be reading it.
    if not path.exists():
        path.write_text("".join(LINES))
    return path


def text_of(folder, **options):
    """Return a text task of a few kB, with few evaluated tokens."""
    return replace(text_task(str(write_text(folder)), length=LENGTH), num_validation_tokens=256, **options)


def model_of(gate="bma", **options):
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "max_length": LENGTH}
    return TransformerConfig(gate=gate, **(sizes | options))


def run_of(task, *, gate="bma", variant="bma", seed=0, block=0, model=None, **training):
    options = {"steps": STEPS, "batch_size": 4, "lr": 1e-2, "num_evaluations": 4, "num_observations": 2} | training
    return Run(
        variant=variant,
        block=block,
        seed=seed,
        model=model_of(gate) if model is None else model,
        task=task,
        training=Training(**options),
    )


def executed(run, **context):
    return execute_run(run, RunContext(**context))


def timeless(record):
    """All of a record but what depends on the moment."""
    return replace(record, timing=None)


def records_of(lines):
    """The records of the runs that ended, timeless, by their ids."""
    return {line.id: timeless(line) for line in lines if isinstance(line, Record) and line.status != "failed"}


def with_run(record, *, model=None, training=None, **changes):
    """The record of a run with other fields, options of its model or options of its training."""
    run = record.run
    parts = {"model": replace(run.model, **(model or {})), "training": replace(run.training, **(training or {}))}
    return replace(record, run=replace(run, **parts, **changes))


def with_facts(facts, **changes):
    """The facts of a task, changed."""
    return TaskFacts.from_dict(facts.to_dict() | changes)


def tampered(lines, variant, change, *, block=0):
    """The lines, in which one record is changed by a function of it."""
    return [
        change(line) if isinstance(line, Record) and (line.run.variant, line.run.block) == (variant, block) else line
        for line in lines
    ]


def request_of(task, variants="none,bma", **options):
    return Request(variants=parse_variants(variants), task=task, **({"num_seeds": 3} | options))


measure_run = compare_module.measure_run


def use_miniatures(ratios=None, *, layers=False):
    """Make `tiny` miniature, and invent the costs of every variant: its steps take `ratios` of the control's.

    Trained layers are measured only with `layers`, and coarsely: that takes longer than training.
    """
    PRESETS["lm"]["tiny"] = MINIATURE
    compare_module.measure_run = measure_run if layers else leave_unmeasured
    measure._SAMPLING = COARSE

    def made_up(runs, *, control, request):
        return Costs(
            request=request, items=tuple(cost_of(name, (ratios or {}).get(name, 1.0)) for name in runs), environment={}
        )

    compare_module.measure_costs = made_up


def patch_miniatures(patch, *, layers=False):
    """The same until the patch is undone; gives the function that sets them."""
    patch.setitem(PRESETS["lm"], "tiny", PRESETS["lm"]["tiny"])
    patch.setattr(compare_module, "measure_costs", compare_module.measure_costs)
    patch.setattr(compare_module, "measure_run", compare_module.measure_run)
    patch.setattr(measure, "_SAMPLING", measure._SAMPLING)
    use_miniatures(layers=layers)
    return use_miniatures


def leave_unmeasured(run, checkpoints):
    return LayerMeasurements(id=run.id, curvature_reason="not asked for", gauge_reason="not asked for")


def cost_of(variant, ratio=1.0):
    return Cost(
        variant=variant,
        tokens_per_second=1000 / ratio,
        time_ratio=ratio,
        time_ratio_low=ratio,
        time_ratio_high=ratio,
        peak_bytes=2**20,
        decode_milliseconds=None,
        cache_bytes_per_token=None,
    )


def main():
    """Run a comparison in processes: `folder variants num_seeds budget num_processes`; print its events.

    Ctrl-C gives code 130.
    """
    folder, variants, (num_seeds, budget, num_processes) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
    use_miniatures()
    request = request_of(text_of(folder), variants, num_seeds=num_seeds, budget=budget)
    try:
        compare(
            request,
            folder / "out",
            executor=ProcessExecutor(num_processes, checkpoint_seconds=0),
            on_event=lambda event: print(event, flush=True),
        )
    except KeyboardInterrupt:
        sys.exit(130)


def on_ray():
    """Execute pickled runs from standard input by Ray on two cores; write records and events to standard output.

    It has its own process because Ray forks, which fails in a process that has used JAX.
    """
    import ray

    # Ray writes to the standard output when a process is killed.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    runs, folder = pickle.load(sys.stdin.buffer)
    told = []
    records = list(make_executor("ray").execute(runs, checkpoints=folder, report=told.append))
    with output:
        output.write(pickle.dumps((records, told)))
