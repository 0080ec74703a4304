"""A text that is on every machine: sources of Python's standard library, some of them held out."""

import importlib.util
from pathlib import Path

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


def read(modules: tuple[str, ...]) -> list[int]:
    """Return the sources of these modules as one row of bytes."""
    return list(b"\n".join(Path(importlib.util.find_spec(name).origin).read_bytes() for name in modules))


if __name__ == "__main__":
    print(f"{len(read(MODULES)):,} bytes to train on, {len(read(HELD_OUT)):,} held out")
