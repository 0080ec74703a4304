"""Files: written whole or not at all, and what a model's file says of itself, the same for every framework."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_FORMAT = "tidegate"
_VERSION = "1"


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file beside its place and move it there, so that no reader, and no crash, ever meets half of one.

    After an error the file that was there is as it was, and the new one is removed. Only a process that is killed
    leaves a `<name>.<random>.partial` behind.

    path  : in a folder that exists
    write : is called with the path to write to, which does not exist yet
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_metadata(kind: str, config: str) -> dict[str, str]:
    """Return the metadata of a model's file.

    kind   : the model's class
    config : its configuration as JSON
    """
    return {"format": _FORMAT, "version": _VERSION, "model": kind, "config": config}


def require_metadata(
    metadata: Mapping[str, str], path: str | os.PathLike[str], *, kinds: Iterable[str], writer: str
) -> tuple[str, str]:
    """Check a file's metadata, and return the model's class and its configuration as JSON.

    kinds  : the classes that can be read
    writer : the function that writes such files
    """
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path} holds no Tidegate model: its format is {metadata.get('format')!r}, not {_FORMAT!r}. "
            f"Write it with {writer}."
        )
    if metadata.get("version") != _VERSION:
        raise ValueError(f"{path} has the format version {metadata.get('version')!r}; this library reads {_VERSION!r}.")
    kind, kinds = metadata.get("model", ""), tuple(kinds)
    if kind not in kinds:
        raise ValueError(f"{path} holds a model {kind!r}; this library knows {', '.join(kinds)}.")
    return kind, metadata.get("config", "")


def require_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, complaint: str
) -> None:
    """Refuse names or shapes that differ; the error lists all of them after the complaint."""
    found = [
        *(f"{name} is missing" for name in expected if name not in given),
        *(f"{name} is unexpected" for name in given if name not in expected),
        *(
            f"{name} has shape {given[name]}, expected {shape}"
            for name, shape in expected.items()
            if name in given and given[name] != shape
        ),
    ]
    if found:
        raise ValueError(f"{complaint}: {'; '.join(found)}.")


def irregular_kind(path: str | os.PathLike[str]) -> str:
    """Say what a path leads to if it is no regular file, as in "a named pipe"; empty for a regular file.

    Links are followed. An `OSError` if there is nothing. What is no regular file may never end, or wait for ever.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
