"""What is asked of the machine that trains: its versions and processor, its device, and its memory."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import sys
from functools import cache
from pathlib import Path

_PACKAGES = ("tidegate", "torch", "numpy", "scipy")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""The names that glibc's mallopt gives to its options."""
_KEPT_BYTES = 2**30


def environment() -> dict[str, str]:
    """Return what numbers may depend on besides the run: versions, processor, number of cores."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        **versions,
        "source": _source(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


@cache
def _source() -> str:
    """Hash this package's own code: a version alone does not tell two states of a working copy apart."""
    root = Path(__file__).parents[2]
    content = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return content.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def out_of_memory_kills() -> int | None:
    """Count the processes that the kernel has killed for lack of memory; None if it does not tell."""
    counts = [count for file in _kill_counters() if (count := _read_kills(file)) is not None]
    return sum(counts) if counts else None


def _kill_counters() -> list[Path]:
    """Files with a line `oom_kill <count>`: of the whole machine, and of this process's control group."""
    root, files = Path("/sys/fs/cgroup"), [Path("/proc/vmstat")]
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return files
    for group in groups:
        _, controllers, place = group.split(":", 2)
        if not controllers:
            files.append(root / place.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            # Inside a container the group's own path is not there, and it is the root.
            places = (root / "memory" / place.lstrip("/"), root / "memory")
            files.append(next((file for file in places if file.is_dir()), root) / "memory.oom_control")
    return files


def _read_kills(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def require_device(name: str) -> None:
    """Refuse a device that PyTorch does not know, or that this machine does not have."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise ValueError(f"device {name} cannot be used here: {reason}. Leave it out to train on the CPU.") from None


def keep_freed_memory() -> None:
    """Make this process keep up to a gibibyte of freed memory; without glibc, do nothing.

    A training step frees and allocates the same megabytes again and again. By default they go back to the system, and
    each page comes anew, zeroed: about a fifth of a small model's step.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    library.mallopt(_TOP_PAD, _KEPT_BYTES // 16)
