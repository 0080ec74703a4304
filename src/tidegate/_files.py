"""What stands in the file of a model beside its weights, and what is refused: the same for every framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

_FORMAT = "tidegate"
_VERSION = "1"


def file_metadata(kind: str, config: str) -> dict[str, str]:
    """What a file says of itself.

    kind   : the model's class
    config : its configuration as JSON
    """
    return {"format": _FORMAT, "version": _VERSION, "model": kind, "config": config}


def require_metadata(
    metadata: Mapping[str, str], path: str | os.PathLike[str], *, kinds: Iterable[str], writer: str
) -> tuple[str, str]:
    """The model's class and its configuration as JSON, from the metadata of a file that can be read here.

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
    """The same names and the same shapes; else the complaint and everything that differs."""
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
