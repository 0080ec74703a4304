"""A Ray cluster of two machines that are both this one: `python lab_cluster.py FOLDER SCENARIO...`.

Each scenario executes runs, may break something meanwhile, and writes records and events to the folder. It has its own
process because Ray forks, which fails in a process that has used JAX.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import ray
from lab_runs import run_of, text_of
from ray.cluster_utils import Cluster

from tidegate.lab.training.events import Notice, Progress
from tidegate.lab.training.executors.executor import RunResources
from tidegate.lab.training.executors.ray import RayExecutor

SETTINGS = {
    # A lost machine refuses connections, and is noticed after ten checks; a busy one has ten seconds for each.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 10,
    # With lower priority Ray's processes would starve beside other tests.
    "worker_niceness": 0,
}
LONG = 250
"""Number of steps of runs that are disturbed."""
TOGETHER = RunResources(processes=2)


def long_runs(task):
    return [run_of(task, variant=f"long {seed}", seed=seed, steps=LONG) for seed in range(3)]


def pair_run(task):
    return run_of(task, gate="g1", variant="g1", steps=LONG)


class Machines:
    """A head, which computes too, and another machine; one core each."""

    def __init__(self):
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": SETTINGS}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.other = self.cluster.add_node(num_cpus=1)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def lose_other(self):
        self.cluster.remove_node(self.other, allow_graceful=False)

    def replace_other(self):
        self.other = self.cluster.add_node(num_cpus=1)

    @property
    def nodes(self):
        return self.cluster.head_node, self.other

    def workers(self, name, *nodes):
        """Return the processes of tasks or actors with a name, on these machines or on both."""
        raylets = {info.process.pid for node in nodes or self.nodes for info in node.all_processes.get("raylet", [])}
        return [
            process.pid
            for process in psutil.process_iter(["ppid", "cmdline"])
            if process.info["ppid"] in raylets and "".join(process.info["cmdline"] or ()).startswith(f"ray::{name}")
        ]


def execute(runs, folder, happen=lambda event: None, **options):
    """Return the records and events of runs; `happen` is called for each event."""
    told = []

    def report(event):
        told.append(event)
        happen(event)

    executor = RayExecutor(**options, checkpoint_seconds=0.2)
    return list(executor.execute(runs, checkpoints=folder / "checkpoints", report=report)), told


def crowded(machines, task, folder):
    """Return the errors of runs that do not fit the cluster, in place of records."""
    said = []
    for resources in (RunResources(cpus=2), RunResources(processes=3), RunResources(cpus=4, processes=2)):
        try:
            RayExecutor(resources).require([run_of(task, batch_size=6)])
        except ValueError as problem:
            said.append(str(problem))
    return said, []


def losses(machines, task, folder):
    """Three runs on two machines: a process on the first is killed; when that is noticed, the second leaves.

    Each happens in the first half of a run, since later the run may end before its process.
    """
    moments = []

    def happen(event):
        first, other = machines.nodes
        if isinstance(event, Notice):
            moments.append("missed")
        elif event.step > LONG // 2:
            return
        elif not moments and (workers := machines.workers(event.variant, first)):
            os.kill(workers[0], signal.SIGKILL)
            moments.append("killed")
        elif moments == ["killed", "missed"] and machines.workers(event.variant, other):
            machines.lose_other()
            moments.append("left")

    answer = execute(long_runs(task), folder, happen)
    assert moments == ["killed", "missed", "left", "missed"], moments
    machines.replace_other()
    return answer


def interrupted(machines, task, folder):
    """Three runs on two machines, stopped at the first event and resumed."""
    return stopped_and_again(long_runs(task), folder)


def together(machines, task, folder):
    """A run of two processes."""
    return execute([pair_run(task)], folder, resources=TOGETHER)


def together_lost(machines, task, folder):
    """A run of two processes: one is killed, then a machine leaves, and another joins when that is noticed."""
    moments = []

    def happen(event):
        if not moments and isinstance(event, Progress):
            os.kill(machines.workers("RayTrainWorker")[0], signal.SIGKILL)
            moments.append("killed")
        elif moments == ["killed"] and isinstance(event, Progress):
            machines.lose_other()
            moments.append("left")
        elif isinstance(event, Notice) and "waits until one joins" in event.text:
            machines.replace_other()
            moments.append("joined")

    answer = execute([pair_run(task)], folder, happen, resources=TOGETHER)
    assert moments == ["killed", "left", "joined"]
    return answer


def together_failed(machines, task, folder):
    """A run of two processes whose data is missing."""
    return execute([replace(pair_run(task), task=replace(task, source="gone.txt"))], folder, resources=TOGETHER)


def together_interrupted(machines, task, folder):
    """Two runs of two processes each, stopped at the first event and resumed."""
    run = pair_run(task)
    return stopped_and_again([run, replace(run, seed=1)], folder, resources=TOGETHER)


def stopped_and_again(runs, folder, **options):
    def happen(event):
        os.kill(os.getpid(), signal.SIGINT)

    try:
        execute(runs, folder, happen, **options)
    except KeyboardInterrupt:
        return execute(runs, folder, **options)
    raise AssertionError("the runs were to be stopped")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (crowded, losses, interrupted, together, together_lost, together_failed, together_interrupted)
}


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    # Ray writes to the standard output when a process is killed.
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        # Whatever folder a node is given, Ray writes the address of the cluster into its default one.
        os.environ["RAY_TMPDIR"] = place
        task, machines = text_of(folder), Machines()
        for name in names:
            start = time.monotonic()
            place = folder / name
            place.mkdir()
            answer = SCENARIOS[name](machines, task, place)
            (place / "answer.pickle").write_bytes(pickle.dumps(answer))
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        ray.shutdown()
        machines.cluster.shutdown()


if __name__ == "__main__":
    main()
