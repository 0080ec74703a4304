"""Named texts from a file, a folder, a pattern or JSON lines, and their fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from tidegate._files import nonregular_file_type
from tidegate._validation import InputError

_SNIFFED_BYTES = 8192
"""Bytes at the start of a file that are searched for a zero byte, which text does not contain."""
_RECORDS = "records.jsonl"
_WILDCARDS = set("*?[")
_LONGEST_PLAN = 1 << 20
"""Maximum length in bytes of a plan, the first line of records."""

Content: TypeAlias = bytes | memoryview
"""A text, or a view of a part of it."""


class Document(NamedTuple):
    """One text."""

    name: str
    """Path relative to the corpus, so that a corpus can be moved."""
    content: Content


def fingerprint(*groups: Sequence[Document]) -> str:
    """Return a hash of names and contents, their order and their groups, as sixteen hexadecimal digits."""
    whole = hashlib.sha256()
    for group in groups:
        whole.update(len(group).to_bytes(8))
        for document in group:
            whole.update(hashlib.sha256(document.name.encode(errors="surrogateescape")).digest())
            whole.update(hashlib.sha256(document.content).digest())
    return whole.hexdigest()[:16]


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise InputError if it cannot be read, or is a pipe or a device."""
    try:
        _require_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> InputError:
    """Return the error for a file or folder that the system cannot read."""
    return InputError("data", expected="readable", got=path, hint=f"{error.strerror or error}.")


def changed(source: str, before: str, now: str) -> InputError:
    """Return the error for data whose fingerprint differs from that of the run."""
    hint = f"It has changed: its fingerprint was {before} and is {now}. Restore the data, or choose another out."
    return InputError("data", expected="unchanged", got=Path(source), hint=hint)


def _require_regular(path: Path) -> None:
    if kind := nonregular_file_type(path):
        raise InputError("data", expected="a file", got=path, hint=f"It is {kind}. Write its content to a file first.")


def read_json(text: bytes) -> Any:
    """Parse JSON from any writer, with nan and infinities. Raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def expand_home(source: str) -> Path:
    """Return the path with `~` expanded. Raise InputError if there is no such user."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        hint = "There is no such home directory. Write the full path."
        raise InputError("data", expected="a path in an existing home directory", got=source, hint=hint) from error


def exists(path: Path) -> bool:
    """Return whether a file or folder exists. Raise InputError if that cannot be determined."""
    try:
        return path.exists()
    except OSError as error:
        raise unreadable(path, error) from error


def holds_records(folder: Path) -> bool:
    """Return whether a folder has the records of a comparison: the first line of `records.jsonl` is a plan."""
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
    """Return the last index up to `place` that is not inside a UTF-8 character."""
    for start in range(place, max(place - 4, 0), -1):
        if start == len(content) or content[start] & 0b1100_0000 != 0b1000_0000:
            return start
    return place


def is_pattern(source: str) -> bool:
    """Return whether a source is a pattern of file names instead of the name of a file."""
    return bool(_WILDCARDS & set(source)) and not exists(Path(source))


def file_documents(source: str, field: str) -> tuple[Document, ...]:
    """Return the documents of a file, of a folder, or of the files that match a pattern, sorted by name.

    A `.jsonl` file has one document per line, in `field`. Empty documents are dropped.
    """
    documents = list[Document]()
    for name, path in text_files(source):
        if path.suffix == ".jsonl":
            documents += record_documents(path, name, field)
        elif content := read_bytes(path):
            documents.append(Document(name, content))
    if not documents:
        raise InputError("data", expected="a non-empty text file, or a folder of such files", got=Path(source))
    return tuple(documents)


def text_files(source: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each text file of a source, sorted by name.

    In folders and patterns, hidden files, binary files and output folders of comparisons are skipped.
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
    """Yield the documents of a file of JSON lines; empty ones are dropped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = read_json(line)
            except ValueError as error:
                hint = f"{place} is not JSON: {error}."
                raise InputError("data", expected="one JSON object per line", hint=hint) from error
            if text := record_text(record, field, place):
                yield Document(f"{name}:{number}", text)


def record_text(record: Any, field: str, place: str) -> bytes:
    """Return the text in a field of a JSON object or of a row of a dataset; empty if the field is null.

    `place` is its file and line, for errors.
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
        raise InputError("field", expected="a field with text", got=field, hint=hint)
    # A lone surrogate is valid in JSON, but not in UTF-8.
    return text.encode(errors="replace")


def _named_files(source: str) -> list[tuple[str, Path]]:
    """Return the files of a source with their relative names, sorted by name."""
    path, pattern = Path(source), is_pattern(source)
    if not pattern and not path.is_dir():
        return [(path.name, path)]
    # The root of a pattern is the last folder before its first wildcard.
    root = next(parent for parent in path.parents if not _WILDCARDS & set(str(parent))) if pattern else path
    if holds_records(root):
        hint = f"It has the {_RECORDS} of a comparison. Keep text in another folder."
        raise InputError("data", expected="a folder without a comparison", got=path, hint=hint)
    files = _matches(path, root) if pattern else files_below(path)
    return sorted((found.relative_to(root).as_posix(), found) for found in files)


def _matches(pattern: Path, root: Path) -> list[Path]:
    """Return all files that match, without hidden ones and output folders of comparisons."""
    is_comparison = cache(holds_records)
    below = pattern.relative_to(root)
    files: list[Path] = []
    # Before Python 3.13, a trailing `**` matches folders only.
    for path in root.glob(str(below / "*" if below.name == "**" else below)):
        inner = path.relative_to(root)
        is_hidden = any(part.startswith(".") for part in inner.parts)
        if not is_hidden and path.is_file() and not any(is_comparison(root / folder) for folder in inner.parents[:-1]):
            files.append(path)
    if not files:
        hint = "Quote the pattern, and check its folder."
        raise InputError("data", expected="a pattern that matches files", got=pattern, hint=hint)
    return files


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, without hidden files and folders and output folders of comparisons.

    Pipes, devices and links to them are skipped. A dangling link is not, so that reading it is an error.
    """

    def stop(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for here, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and not holds_records(Path(here, name))]
        for path in (Path(here, name) for name in files if not name.startswith(".")):
            with suppress(OSError):
                if nonregular_file_type(path):
                    continue
            yield path
