"""The machine that trains: versions and processor, device, memory."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path

from tidegate._validation import InputError

_PACKAGES = ("tidegate", "torch", "numpy", "scipy")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""
_KEPT_BYTES = 2**30
_VMSTAT = Path("/proc/vmstat")
_LONG_PRODUCT = 0.05
"""Seconds; after a slower product no larger one is timed."""


def environment() -> dict[str, str]:
    """Return the environment that may affect results: versions, processor, number of cores."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        **versions,
        "source": _source(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def num_cores() -> int:
    """Return the number of cores that this process may use, or of all cores if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _source() -> str:
    """Return a hash of this package's code, which distinguishes states of a working copy of one version."""
    root = Path(__file__).parents[2]
    content = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return content.hexdigest()[:16]


def _processor() -> str:
    lines = _kernel_lines(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def out_of_memory_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory, in any control group; None if unknown."""
    return _kernel_count(_VMSTAT, "oom_kill ")


def _kernel_count(file: Path, name: str) -> int | None:
    """Return the number behind a name in a file of the kernel; None without one."""
    return next((int(line.split()[1]) for line in _kernel_lines(file) if line.startswith(name)), None)


def _kernel_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def require_device(name: str) -> None:
    """Raise InputError for a device that PyTorch cannot use on this machine."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        hint = f"{reason}. Leave it out to train on the CPU."
        raise InputError("device", expected="one that can be used here", got=name, hint=hint) from None


def available_bytes(device: str) -> int | None:
    """Return the free memory of a device; None if it is unknown."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    kibibytes = _kernel_count(Path("/proc/meminfo"), "MemAvailable:")
    return None if kibibytes is None else 1024 * kibibytes


def matrix_flops(device: str, *, half: bool) -> float:
    """Return the measured peak FLOP/s of matrix products on a device, in bfloat16 if `half`, else in float32.

    The matrices grow until a product is slow: some processors have no units for half precision.
    """
    import torch

    best = 0.0
    for size in (64, 128, 256, 512, 1024, 2048, 4096):
        factor = torch.ones(size, size, device=device, dtype=torch.bfloat16 if half else torch.float32)
        seconds: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            # `item` waits for the device.
            (factor @ factor)[0, 0].item()
            seconds.append(time.perf_counter() - start)
        best = max(best, 2 * size**3 / min(seconds))
        if min(seconds) > _LONG_PRODUCT:
            break
    return best


def use_threads(count: int) -> None:
    """Set the number of CPU threads; for the command line, which does not import PyTorch."""
    import torch

    torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Make this process keep up to a gibibyte of freed memory; without glibc, do nothing.

    A training step frees and allocates the same megabytes again and again. By default they go back to the system, which
    zeroes each page again: about a fifth of a small model's step.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    library.mallopt(_TOP_PAD, _KEPT_BYTES // 16)
