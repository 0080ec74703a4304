"""Points at which a test can break off the writing of files, injected into the calls of the operating system.

The environment variable `TIDEGATE_FAULT` asks for one as `NAME:COUNT:ACTION`, such as `record:half-written:2:kill`: the
second time that a process comes to the point, it is killed. Processes that it starts inherit the variable and, by the
`sitecustomize.py` in `injected`, the wrappers; they count for themselves.
"""

import errno
import io
import os
import re
import signal
from collections import Counter
from pathlib import Path

VARIABLE = "TIDEGATE_FAULT"
POINTS = {
    "record:before-write": "a record is about to be written",
    "record:half-written": "half of a record is written",
    "record:written": "a record is on disk",
    "checkpoint:half-written": "half of a checkpoint is written",
    "checkpoint:before-move": "a checkpoint is written but not in place",
    "checkpoint:after-previous": "the last checkpoint was moved to the previous one",
    "checkpoint:moved": "a checkpoint is in place",
    "model:before-move": "a model is written but not in place",
    "gates:before-move": "gates.safetensors is written but not in place",
    "gates:between": "gates.safetensors is in place, gates.json is not",
    "file:before-move": "any other file is written but not in place",
}
"""What is on the disk at each point."""
ACTIONS = ("kill", "full")
"""`kill` ends the process by SIGKILL; `full` raises what a full disk raises."""
INJECTED = Path(__file__).parent / "injected"

reached = Counter()
_KINDS = {
    b'"format":"tidegate-checkpoint"': "checkpoint",
    b'"format":"tidegate-gates"': "gates",
    b'"format":"tidegate"': "model",
}
_MOVED = {"checkpoint": "checkpoint:moved", "gates": "gates:between"}
_NEW_CHECKPOINT = re.compile(r"[0-9a-f]{16}\.safetensors\.[0-9a-f]{16}\.partial")
_fsync, _replace, _open, _open_file = os.fsync, os.replace, io.open, os.open


def ask_for(monkeypatch, point, count=1, action="full"):
    """Ask for a fault in this process and in those that it starts, until the test ends."""
    for name, value in environment(point, count, action).items():
        monkeypatch.setenv(name, value)
    reached.clear()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(io, "open", open_in_halves)
    monkeypatch.setattr(os, "open", open_file)


def environment(point, count=1, action="kill"):
    """The variables that ask a process for a fault, from its beginning."""
    path = os.pathsep.join(filter(None, (str(INJECTED), str(INJECTED.parent), os.environ.get("PYTHONPATH"))))
    return {VARIABLE: f"{point}:{count}:{action}", "PYTHONPATH": path}


def install():
    """Wrap the calls of this process, if the environment asks for a fault."""
    if VARIABLE in os.environ:
        os.fsync, os.replace, io.open, os.open = fsync, replace, open_in_halves, open_file


def reach(name):
    """Do what the environment asks for at this point."""
    point, count, action = os.environ[VARIABLE].rsplit(":", 2)
    assert {name, point} <= POINTS.keys()
    assert action in ACTIONS
    if name != point:
        return
    reached[name] += 1
    if reached[name] != int(count):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fsync(descriptor):
    """As `os.fsync`; a file that is to be moved is then whole, and a record is on the disk."""
    _fsync(descriptor)
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if path.suffix == ".partial":
        reach(f"{_kind(path)}:before-move")
    elif path.name == "records.jsonl":
        reach("record:written")


def replace(source, target, **options):
    """As `os.replace`; a checkpoint is then the previous one, or a new file in its place."""
    kind = _kind(source) if Path(source).suffix == ".partial" else None
    _replace(source, target, **options)
    if ".previous." in Path(target).name:
        reach("checkpoint:after-previous")
    elif kind in _MOVED:
        reach(_MOVED[kind])


def open_file(path, *arguments, **options):
    """As `os.open`; before a new checkpoint begins, half of it is where safetensors would write it."""
    if isinstance(path, Path) and _NEW_CHECKPOINT.fullmatch(path.name):
        temporary = path.with_name(".tmpaB3dE5")
        temporary.write_bytes(b"half of a checkpoint")
        reach("checkpoint:half-written")
        temporary.unlink()
    return _open_file(path, *arguments, **options)


def _kind(path):
    """What kind of file this is, by the format that its header names."""
    with _open(path, "rb") as file:
        header = file.read(1 << 20)
    return next((kind for name, kind in _KINDS.items() if name in header), "file")


def open_in_halves(file, mode="r", *arguments, **options):
    """As `open`; what is appended to records is written in two halves."""
    if mode == "a+b" and Path(file).name == "records.jsonl":
        return _InHalves(io.FileIO(file, "a+"))
    return _open(file, mode, *arguments, **options)


class _InHalves(io.BufferedRandom):
    def truncate(self, size=None):
        reach("record:before-write")
        return super().truncate(size)

    def write(self, text):
        super().write(text[: len(text) // 2])
        self.flush()
        reach("record:half-written")
        return super().write(text[len(text) // 2 :])
