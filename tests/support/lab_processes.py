"""One of two processes that train miniatures together: `python lab_processes.py FOLDER CASES`.

For each case, a gate and a parallel engine, it makes some steps and writes losses and weights to the folder. Then it
resumes runs that one process has started, and starts others.
"""

import json
import sys
from pathlib import Path

import torch
from lab_runs import model_of, run_of, text_of
from safetensors.torch import save_file

from tidegate.lab.training.events import Interrupted
from tidegate.lab.training.model import build_model
from tidegate.lab.training.optimizers import make_optimizer
from tidegate.lab.training.parallel import Processes, joined_processes, whole_tensor
from tidegate.lab.training.train import RunContext, execute_run, train_step

LONG, SHORT = 50, 8
"""Steps of a case."""
KINDS = ("ddp", "fsdp", "tp")
SIZES = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
STOP = 5


def run_with(task, gate, **options):
    return run_of(task, gate=gate, variant=gate, model=model_of(gate, **SIZES), **options)


def steps_of(run, processes=None):
    """Return the loss before each step of a run, and the weights after all, in the default dtype."""
    model = build_model(run.model, seed=run.seed)
    computing = model if processes is None else processes.distribute(model)
    optimizer = make_optimizer(model, run)
    data, losses = run.task.load(), []
    for step in range(run.training.steps):
        batch = data.batch(seed=run.seed, step=step, size=run.training.batch_size)
        losses.append(train_step(computing, optimizer, batch, run, step, processes).loss)
    return losses, {name: whole_tensor(value).clone() for name, value in model.state_dict().items()}


def stopped_after(count):
    """Return the options of a context that stops a run after some steps."""
    steps = []
    return {"report": lambda event: steps.append(event), "stopping": lambda: len(steps) >= count}


def main():
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    task = text_of(folder)
    with joined_processes("ddp", "cpu") as first:
        for dtype, gate, kind, accumulate, steps in cases:
            torch.set_default_dtype(getattr(torch, dtype))
            run = run_with(task, gate, steps=steps, accumulate=accumulate)
            losses, weights = steps_of(run, Processes(kind, "cpu"))
            if first.is_first:
                name = f"{dtype}-{gate}-{kind}-{accumulate}-{steps}"
                save_file(weights, folder / f"{name}.safetensors")
                (folder / f"{name}.json").write_text(json.dumps(losses))
        torch.set_default_dtype(torch.float32)
        for kind in KINDS:
            run = run_with(task, "g1")
            processes = Processes(kind, "cpu")
            record = execute_run(run, RunContext(folder=folder / f"from-one-{kind}", processes=processes))
            if first.is_first:
                (folder / f"from-one-{kind}.json").write_text(json.dumps([record.status, record.loss, record.error]))
            try:
                execute_run(
                    run, RunContext(folder=folder / f"from-two-{kind}", processes=processes, **stopped_after(STOP))
                )
            except Interrupted:
                continue
            raise AssertionError("the run was to be stopped")


if __name__ == "__main__":
    main()
