"""Points at which a test can interrupt the writing of files, injected into calls of the operating system.

The environment variable `TIDEGATE_FAULT` requests one as `NAME:COUNT:ACTION`. With `record:half-written:2:kill`, a
process is killed the second time it reaches the point. Child processes inherit the variable and, by
`injected/sitecustomize.py`, the wrappers; each has its own count.
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
    "file:before-move": "any other file is written but not in place",
}
"""The state of the disk at each point."""
ACTIONS = {
    "full": lambda: _raise_full_disk(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "pause": lambda: os.killpg(0, signal.SIGSTOP),
}
"""`full` raises the error of a full disk, `kill` and `terminate` end the process, `pause` stops its process group."""
INJECTED = Path(__file__).parent / "injected"

reached = Counter()
_KINDS = {
    b'"format":"tidegate-checkpoint"': "checkpoint",
    b'"format":"tidegate"': "model",
}
_NEW_CHECKPOINT = re.compile(r"[0-9a-f]{16}\.safetensors\.[0-9a-f]{16}\.partial")
_fsync, _replace, _open, _open_file = os.fsync, os.replace, io.open, os.open


def ask_for(monkeypatch, point, count=1, action="full"):
    """Request a fault in this process and its children, until the test ends."""
    for name, value in environment(point, count, action).items():
        monkeypatch.setenv(name, value)
    reached.clear()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(io, "open", open_in_halves)
    monkeypatch.setattr(os, "open", open_file)


def environment(point, count=1, action="kill"):
    """Return the variables that request a fault in a new process."""
    path = os.pathsep.join(filter(None, (str(INJECTED), str(INJECTED.parent), os.environ.get("PYTHONPATH"))))
    return {VARIABLE: f"{point}:{count}:{action}", "PYTHONPATH": path}


def install():
    """Wrap the calls of this process, if the environment requests a fault."""
    if VARIABLE in os.environ:
        os.fsync, os.replace, io.open, os.open = fsync, replace, open_in_halves, open_file


def reach(name):
    """Act if the environment requests a fault at this point."""
    point, count, action = os.environ[VARIABLE].rsplit(":", 2)
    assert {name, point} <= POINTS.keys()
    if name != point:
        return
    reached[name] += 1
    if reached[name] == int(count):
        ACTIONS[action]()


def _raise_full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fsync(descriptor):
    """Call `os.fsync`, after which a partial file is complete and a record is on disk."""
    _fsync(descriptor)
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if path.suffix == ".partial":
        reach(f"{_kind(path)}:before-move")
    elif path.name == "records.jsonl":
        reach("record:written")


def replace(source, target, **options):
    """Call `os.replace`, after which a checkpoint is the previous one or the last one."""
    is_checkpoint = Path(source).suffix == ".partial" and _kind(source) == "checkpoint"
    _replace(source, target, **options)
    if ".previous." in Path(target).name:
        reach("checkpoint:after-previous")
    elif is_checkpoint:
        reach("checkpoint:moved")


def open_file(path, *arguments, **options):
    """Call `os.open`; if asked, first write half of a new checkpoint where safetensors would."""
    is_asked = os.environ[VARIABLE].startswith("checkpoint:half-written:")
    if is_asked and isinstance(path, Path) and _NEW_CHECKPOINT.fullmatch(path.name):
        temporary = path.with_name(".tmpaB3dE5")
        temporary.write_bytes(b"half of a checkpoint")
        reach("checkpoint:half-written")
        temporary.unlink()
    return _open_file(path, *arguments, **options)


def _kind(path):
    """Return the kind of a file, from the format in its header."""
    with _open(path, "rb") as file:
        header = file.read(1 << 20)
    return next((kind for name, kind in _KINDS.items() if name in header), "file")


def open_in_halves(file, mode="r", *arguments, **options):
    """Call `open`; lines of records are written in two halves."""
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
