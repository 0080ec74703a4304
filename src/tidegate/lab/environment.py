"""Versions and machine, for the records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["environment"]

_PACKAGES = ("tidegate", "torch", "numpy", "scipy")


def environment() -> dict[str, str]:
    """What numbers may depend on besides the run: versions, processor, number of cores."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
