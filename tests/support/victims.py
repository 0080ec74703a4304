"""Processes that the tests of tests/faults start in order to kill them.

A server process imports PyTorch and the laboratory once and forks for each victim, which starts within milliseconds. It
computes nothing itself, so that the fork loses no threads.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace

import fault_points
import psutil
from lab_runs import LENGTH, request_of, run_of, text_of, use_miniatures, write_text

from tidegate.cli import app
from tidegate.lab.compare.cost import _status_bytes
from tidegate.lab.compare.run import compare
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.study import record_of, save_record
from tidegate.lab.tasks.tokenizing import tokenize
from tidegate.lab.training.events import Notice, Progress, ignore
from tidegate.lab.training.executors.executor import SerialExecutor, make_executor
from tidegate.lab.training.executors.processes import ProcessExecutor
from tidegate.lab.training.machine import num_cores
from tidegate.lab.training.train import RunContext, execute_run

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["victims", "hostile"])

SECONDS_BETWEEN_CHECKPOINTS = 0.02
"""Users have twenty seconds, in which miniature runs end."""


def start(function, *arguments, environment=None):
    """Start a victim: a function of a module of tests/support, with additional environment variables."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        process = _context.Process(target=_begin, args=(environment or {}, function, arguments))
        process.start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return process


def wait_for_server():
    """Wait until the server has imported everything, so that victims start at once."""
    start(os.getpid).join()


def kill(process):
    """Kill a victim; return whether it was still alive."""
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return alive


def kill_child(process):
    """Kill one child of a victim, and wait for the end of the victim; return whether there was one to kill."""
    children = _children(process.pid)
    for child in children[:1]:
        _end(child)
    process.join()
    return bool(children)


def kill_all(process):
    """Kill a victim and all of its children."""
    children = _children(process.pid)
    alive = kill(process)
    for child in children:
        _end(child)
    return alive


def _children(pid):
    """Return the workers of a process, without the resource tracker of multiprocessing."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children() if "spawn_main" in "".join(child.cmdline())]
    return []


def _end(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _begin(environment, function, arguments):
    os.environ.update(environment)
    fault_points.install()
    # The last output of a victim does not belong to the test.
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123, open until the end
    function(*arguments)


def small_comparison(folder, out, num_seeds, steps):
    """Two variants, run one after another, with a checkpoint every few steps."""
    use_miniatures()
    executor = SerialExecutor(checkpoint_seconds=SECONDS_BETWEEN_CHECKPOINTS)
    compare(_request(folder, num_seeds, steps), out, executor=executor, on_event=ignore)


def comparison_in_processes(folder, out, num_seeds, steps):
    """The same, in two processes, whose runs are retried when one is killed; it logs to `events_path`."""
    use_miniatures()
    executor = ProcessExecutor(2, checkpoint_seconds=SECONDS_BETWEEN_CHECKPOINTS)
    compare(_request(folder, num_seeds, steps), out, executor=executor, on_event=_EventLog(events_path(out)).add)


def events_path(out):
    """Return the log of a comparison in processes, with a line for each step and each lost process."""
    return out.with_suffix(".events")


class _EventLog:
    def __init__(self, path):
        self.path = path

    def add(self, event):
        # The forecast is a notice of no run.
        if isinstance(event, Notice | Progress) and event.run:
            with self.path.open("a") as file:
                file.write(json.dumps([type(event).__name__, event.run, time.time()]) + "\n")


def first_losses(out):
    """Return when each run first lost its process, in seconds of the clock."""
    lines = map(json.loads, events_path(out).read_text().splitlines()) if events_path(out).exists() else ()
    losses = [(run, moment) for kind, run, moment in lines if kind == "Notice"]
    return dict(reversed(losses))


def wait_for_a_step(process, out):
    """Wait until a comparison in processes has made a step, or has ended."""
    while process.is_alive() and not events_path(out).exists():
        process.join(0.01)


def limited_comparison(folder, out, num_seeds, steps):
    """The first one, in a process that may write no file beyond 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    small_comparison(folder, out, num_seeds, steps)


def _request(folder, num_seeds, steps):
    return request_of(text_of(folder), num_seeds=num_seeds, budget=steps * 4 * LENGTH)


def small_study(_folder, out):
    """The record of a study in miniature."""
    study = STUDIES["depth"]
    options = replace(study.options, gates=("none", "g1"), depths=(1, 2), num_seeds=2, num_planes=2)
    save_record(record_of(study, study.run(options)), out / "depth.json")


def small_training(folder, out):
    """The verb `train`: a miniature that saves after every step."""
    sizes = ["--d-model=16", "--num-layers=1", "--num-heads=2", "--length=16", "--batch-size=4", "--tokens=1280"]
    text = str(write_text(folder))
    app(["train", "--gate=g1", "--data", text, "--out", str(out), "--save-seconds=0", "--lr=1e-2", *sizes])


def small_tokenizing(folder, out):
    """Byte pairs of a text in a dozen shards."""
    tokenize(str(write_text(folder)), out, tokenizer="bpe:300", shard_bytes=512)


def many_runs(folder, executor, count, answer):
    """Execute many runs of one step; write the overhead per run and the growth of this process."""
    if executor == "ray":
        import ray

        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    runs = [run_of(text_of(folder), seed=seed, steps=1, num_evaluations=1, num_observations=1) for seed in range(count)]
    work = make_executor(executor).execute(runs, checkpoints=folder / "checkpoints", report=ignore)
    start, finished, memory = time.perf_counter(), 0, []
    for record in work:
        finished += record.status == "finished"
        memory.append(_status_bytes("VmRSS"))
    seconds = time.perf_counter() - start
    alone = [_seconds(lambda run=run: execute_run(run, RunContext())) for run in runs[:20]]
    overhead = (seconds * num_cores() / count) - sorted(alone)[len(alone) // 2]
    growth = memory[-1] - memory[len(memory) // 10]
    answer.write_text(json.dumps({"num_finished": finished, "overhead": overhead, "growth": growth}))


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
