"""Texts with names: from a file, a folder, a pattern or JSON lines, and the fingerprint of a list of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from tidegate._files import nonregular_file_type
from tidegate._validation import InputError

_SNIFFED_BYTES = 8192
"""How much of a file is looked at for a zero byte, which no text has."""
_RECORDS = "records.jsonl"
_WILDCARDS = set("*?[")
_LONGEST_PLAN = 1 << 20
"""Bytes of a first line that may be a plan."""

Content: TypeAlias = bytes | memoryview
"""A text, or a part of one that is not copied."""


class Document(NamedTuple):
    """One text."""

    name: str
    """Relative to where its corpus lies, so that a corpus can be moved."""
    content: Content


def fingerprint(*groups: Sequence[Document]) -> str:
    """Sixteen hexadecimal digits that stand for names and contents, their order, and who is in which group."""
    whole = hashlib.sha256()
    for group in groups:
        whole.update(len(group).to_bytes(8))
        for document in group:
            whole.update(hashlib.sha256(document.name.encode(errors="surrogateescape")).digest())
            whole.update(hashlib.sha256(document.content).digest())
    return whole.hexdigest()[:16]


def read_bytes(path: Path) -> bytes:
    """Return a whole file. Raise InputError if it cannot be read, or is a pipe or a device, which may never end."""
    try:
        _require_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> InputError:
    """Return the error about a file or folder of the data that the system does not give."""
    return InputError("data", expected="readable", got=path, hint=f"{error.strerror or error}.")


def changed(source: str, before: str, now: str) -> InputError:
    """Return the error about data that do not have the fingerprint of a run that began with them."""
    hint = f"It has changed: its fingerprint was {before} and is {now}. Bring the old data back, or choose another out."
    return InputError("data", expected="what it was", got=Path(source), hint=hint)


def _require_regular(path: Path) -> None:
    if kind := nonregular_file_type(path):
        hint = f"It is {kind}. Write what it gives to a file, and name that."
        raise InputError("data", expected="a file", got=path, hint=hint)


def read_json(text: bytes) -> Any:
    """Return JSON as anyone may have written it, nan and infinities included; ValueError if it is none, or too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def expand_home(source: str) -> Path:
    """Return the path with `~` replaced by the home it stands for. Raise InputError if there is no such user."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        hint = "There is no such home. Write the path in full."
        raise InputError("data", expected="a path below a home that exists", got=source, hint=hint) from error


def exists(path: Path) -> bool:
    """Return whether there is such a file or folder. Raise InputError if we may not look."""
    try:
        return path.exists()
    except OSError as error:
        raise unreadable(path, error) from error


def holds_records(folder: Path) -> bool:
    """Whether a comparison wrote its records here: the first line of `records.jsonl` is its plan."""
    path = folder / _RECORDS
    try:
        if nonregular_file_type(path):
            return False
        with path.open("rb") as file:
            first = read_json(file.readline(_LONGEST_PLAN))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and cast("dict[str, Any]", first).get("kind") == "plan"


def character_start(content: Content, place: int) -> int:
    """The nearest place at or before this one that is not inside a character of UTF-8."""
    for start in range(place, max(place - 4, 0), -1):
        if start == len(content) or content[start] & 0b1100_0000 != 0b1000_0000:
            return start
    return place


def is_pattern(source: str) -> bool:
    """Whether a source is a pattern of file names and not the name of one."""
    return bool(_WILDCARDS & set(source)) and not exists(Path(source))


def file_documents(source: str, field: str) -> tuple[Document, ...]:
    """The documents of a file, of all files of a folder, or of those that match a pattern, sorted by name.

    A name that ends in `.jsonl` holds one document a line, in `field`. Empty documents are dropped.
    """
    documents = list[Document]()
    for name, path in text_files(source):
        if path.suffix == ".jsonl":
            documents += record_documents(path, name, field)
        elif content := read_bytes(path):
            documents.append(Document(name, content))
    if not documents:
        raise InputError("data", expected="a file with text in it, or a folder of such files", got=Path(source))
    return tuple(documents)


def text_files(source: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of text of a source, sorted by name.

    In folders and patterns hidden and binary files are passed over, and folders into which a comparison writes; a file
    that is named itself is taken as it is.
    """
    named = not is_pattern(source) and not Path(source).is_dir()
    for name, path in _named_files(source):
        try:
            _require_regular(path)
            with path.open("rb") as file:
                is_text = named or b"\0" not in file.read(_SNIFFED_BYTES)
        except OSError as error:
            raise unreadable(path, error) from error
        if is_text:
            yield name, path


def record_documents(path: Path, name: str, field: str) -> Iterator[Document]:
    """Yield the documents of a file of JSON lines, a line at a time; empty ones are dropped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = read_json(line)
            except ValueError as error:
                hint = f"{place} is not JSON: {error}."
                raise InputError("data", expected="one JSON object a line", hint=hint) from error
            if text := record_text(record, field, place):
                yield Document(f"{name}:{number}", text)


def record_text(record: Any, field: str, place: str) -> bytes:
    """The text in a field of a JSON object, or of a row of a dataset; `place` says where that was found.

    Nothing where the field holds null.
    """
    if not isinstance(record, dict):
        hint = f"{place} is {type(record).__name__}."
        raise InputError("data", expected=f"JSON objects with the field {field!r}", hint=hint)
    fields = cast("dict[str, Any]", record)
    if field not in fields:
        found = ", ".join(map(repr, fields)) or "none"
        raise InputError("field", expected=f"a field of {place}, which has {found}", got=field)
    text = "" if fields[field] is None else fields[field]
    if not isinstance(text, str):
        hint = f"{place} has {type(text).__name__} there."
        raise InputError("field", expected="one that holds text", got=field, hint=hint)
    # A lone surrogate can stand in JSON, and in no UTF-8.
    return text.encode(errors="replace")


def _named_files(source: str) -> list[tuple[str, Path]]:
    """The files of a source with their names relative to it, sorted by name."""
    path, pattern = Path(source), is_pattern(source)
    if not pattern and not path.is_dir():
        return [(path.name, path)]
    # The folder of a pattern is the last one before its first wildcard.
    root = next(parent for parent in path.parents if not _WILDCARDS & set(str(parent))) if pattern else path
    if holds_records(root):
        hint = f"A comparison wrote its {_RECORDS} there. Keep text apart."
        raise InputError("data", expected="other than the folder of a comparison", got=path, hint=hint)
    files = _matches(path, root) if pattern else files_below(path)
    return sorted((found.relative_to(root).as_posix(), found) for found in files)


def _matches(pattern: Path, root: Path) -> list[Path]:
    """All files that match, hidden ones and those below a comparison's folder left out."""
    is_ours = cache(holds_records)
    below = pattern.relative_to(root)
    files: list[Path] = []
    # Whether a last `**` means files as well depends on the version of Python.
    for path in root.glob(str(below / "*" if below.name == "**" else below)):
        inner = path.relative_to(root)
        is_hidden = any(part.startswith(".") for part in inner.parts)
        if not is_hidden and path.is_file() and not any(is_ours(root / parent) for parent in inner.parents[:-1]):
            files.append(path)
    if not files:
        hint = "Quote the pattern, and check where it starts."
        raise InputError("data", expected="a pattern that matches files", got=pattern, hint=hint)
    return files


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder; hidden ones, and those below hidden folders or a comparison's, left out.

    So are pipes, devices and links to them. A link that leads nowhere is not: whoever reads it says so.
    """

    def stop(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for here, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and not holds_records(Path(here, name))]
        paths = (Path(here, name) for name in files if not name.startswith("."))
        yield from (path for path in paths if not _is_irregular(path))


def _is_irregular(path: Path) -> bool:
    try:
        return nonregular_file_type(path) != ""
    except OSError:
        return False
