"""Processes that the tests of tests/faults start in order to kill them.

A server process imports PyTorch and the laboratory once and forks for each victim, which begins within milliseconds. It
computes nothing itself, so that no thread is lost by the fork.
"""

import functools
import multiprocessing
import os
import signal
import sys

from lab_runs import LENGTH, request_of, text_of, use_miniatures

from tidegate.lab.compare.run import compare
from tidegate.lab.training.executors import serial
from tidegate.lab.training.train import RunContext

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["victims", "tidegate.lab.studies.catalogue"])

SECONDS_BETWEEN_CHECKPOINTS = 0.02
"""Twenty seconds for users; miniature runs would end before their first."""


def start(function, *arguments, environment=None):
    """Start a victim: a function of a module of tests/support, which may set variables of the environment first."""
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


def kill(process):
    """End a victim at once; returns whether it was still alive."""
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return alive


def _begin(environment, function, arguments):
    os.environ.update(environment)
    # What a victim prints as it dies is no output of a test.
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123, open until the end
    function(*arguments)


def small_comparison(folder, out, num_seeds, steps):
    """Two variants, run one after another, with a checkpoint every few steps."""
    use_miniatures()
    serial.RunContext = functools.partial(RunContext, checkpoint_seconds=SECONDS_BETWEEN_CHECKPOINTS)
    request = request_of(text_of(folder), num_seeds=num_seeds, budget=steps * 4 * LENGTH)
    compare(request, out, executor=serial.SerialExecutor(), tell=lambda _: None)
