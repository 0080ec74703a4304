"""Processes that run on this machine, as the kernel tells of them."""

from pathlib import Path


def running():
    """The number of each process, with the fields after its name in its `stat`: state, parent, group, session …"""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            yield int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
