"""Versions and machine, for the records."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from functools import cache
from pathlib import Path

_PACKAGES = ("tidegate", "torch", "numpy", "scipy")


def environment() -> dict[str, str]:
    """What numbers may depend on besides the run: versions, processor, number of cores."""
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
    """A hash of this package's own code: a version alone does not tell two states of a working copy apart."""
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
