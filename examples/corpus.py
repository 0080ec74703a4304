"""A text corpus that every machine has: sources of Python's standard library, split into training and test modules."""

import importlib.util
from pathlib import Path

import numpy as np

MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "doctest",
    "enum",
)
HELD_OUT = ("textwrap", "heapq")


def read(modules: tuple[str, ...]) -> np.ndarray:
    """Return the sources of these modules as one row of bytes, (length,) int64."""
    sources = b"\n".join(Path(importlib.util.find_spec(name).origin).read_bytes() for name in modules)
    return np.frombuffer(sources, np.uint8).astype(np.int64)


if __name__ == "__main__":
    print(f"{len(read(MODULES)):,} bytes to train on, {len(read(HELD_OUT)):,} held out")
