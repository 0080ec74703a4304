"""Wait for events rather than for seconds."""

import time

import psutil

LIMIT_IN_SECONDS = 240
"""Generous, so that a busy machine passes; a test that hangs fails here, with what it waited for."""


def wait_until(condition, what, *, jobs=()):
    """Wait until `condition()` is true and return its value; fail if that takes too long or one of the jobs ends."""
    deadline = time.monotonic() + LIMIT_IN_SECONDS
    while not (value := condition()):
        for job in jobs:
            assert job.poll() is None, f"{job.args} ended with {job.returncode} before {what}"
        assert time.monotonic() < deadline, f"waited {LIMIT_IN_SECONDS} s for {what}"
        time.sleep(0.02)
    return value


def children_of(pid):
    """The ids of a process's children that still run, oldest first."""
    children = psutil.Process(pid).children()
    return [child.pid for child in sorted(children, key=lambda child: (child.create_time(), child.pid))]
