"""Points at which a test can break off the program: named moments inside the writing of files. Off unless asked for.

The environment variable `TIDEGATE_FAULT` asks for one as `NAME:COUNT:ACTION`, such as `record:half-written:2:kill`: the
second time that a process comes to the point, it is killed. Processes that it starts inherit the variable, and count
for themselves.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

VARIABLE = "TIDEGATE_FAULT"
POINTS: dict[str, str] = {
    "record:before-write": "a line of records.jsonl is about to be written",
    "record:half-written": "half of a line of records.jsonl is in the file",
    "record:written": "a line of records.jsonl is on the disk; `append` has not returned",
    "checkpoint:before-move": "a new checkpoint is whole beside its place; the others are as they were",
    "checkpoint:after-previous": "the old checkpoint is the previous one; the new one is not in its place yet",
    "checkpoint:moved": "a new checkpoint is in its place",
    "model:before-move": "a model's file is whole beside its place",
    "gates:before-move": "gates.safetensors is whole beside its place",
    "gates:between": "gates.safetensors is in its place, gates.json is still that of before",
    "file:before-move": "any other file is whole beside its place: a page, the record of a study, gates.json",
}
"""What is on the disk at each point."""
ACTIONS = ("kill", "full")
"""`kill` ends the process by SIGKILL; `full` raises what a full disk raises."""

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """Do what the environment asks for at this point; nothing unless `TIDEGATE_FAULT` names it."""
    assert name in POINTS, name
    if not (asked := os.environ.get(VARIABLE)):
        return
    point, count, action = _parse(asked)
    if name != point:
        return
    _reached[name] += 1
    if _reached[name] != count:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _parse(asked: str) -> tuple[str, int, str]:
    point, count, action = [*asked.rsplit(":", 2), "", ""][:3]
    if point not in POINTS or not count.isdecimal() or int(count) < 1 or action not in ACTIONS:
        raise ValueError(
            f"{VARIABLE} must be NAME:COUNT:ACTION with a COUNT from 1 on; got {asked!r}. Names: {', '.join(POINTS)}. "
            f"Actions: {', '.join(ACTIONS)}."
        )
    return point, int(count), action
