"""A study: one question, a function that answers it, and how the answer is recorded and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidegate._files import nonregular_file_type, write_content
from tidegate._json import add_checksum, decode, parse_json, verify_checksum
from tidegate._validation import InputError
from tidegate.lab.studies.options import format_command
from tidegate.lab.training.machine import environment
from tidegate.report.page import Page, Prose, Section, Snippet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Study(Generic[_Options, _Result]):
    """One question. Options and result are frozen dataclasses that go through JSON; a result holds its `options`."""

    name: str
    question: str
    claim: str
    """Whose statement it is about, and where what is done here differs from theirs."""
    options: _Options
    """At full size."""
    quick: _Options | None = None
    """For a first look, in less than a minute; None if there is no such."""
    result: type[_Result]
    run: Callable[..., _Result]
    """Called as `run(options, tell=...)`; the same options give the same numbers on one machine."""
    finding: Callable[[_Result], str]
    """What holds, and what does not, in sentences made from the numbers."""
    view: Callable[[_Result], tuple[Section, ...]]
    """The sections of its page."""
    figures: Callable[[_Result], dict[str, Figure]] | None = None
    """Pictures that no panel of a page can draw, by file name, whose ending is the format."""


def record_of(study: Study[Any, _Result], result: _Result) -> dict[str, Any]:
    """Return the answer as JSON values, with the versions that it was made by."""
    return {
        "study": study.name,
        "question": study.question,
        "finding": study.finding(result),
        "result": asdict(result),  # pyright: ignore[reportArgumentType]: a result is a dataclass
        "environment": environment(),
    }


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write a record, numbers to six digits, with a checksum; create the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(record), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    text = json.dumps(add_checksum(rounded), indent=1, ensure_ascii=False, allow_nan=False)
    write_content(path, f"{text}\n".encode())


def read_record(study: Study[Any, _Result], path: Path) -> _Result:
    """Return the answer that a record holds.

    Raises:
        InputError: The record is damaged, or one of another study.
    """
    expected = f"an intact record of the study {study.name}"
    if kind := nonregular_file_type(path):
        raise InputError("record", expected=expected, got=path, hint=f"It is {kind}. Name a {study.name}.json.")
    try:
        record = verify_checksum(parse_json(path.read_bytes()))
        if record.get("study") != study.name:
            raise InputError("study", expected=repr(study.name), got=record.get("study"))
        return decode(study.result, record.get("result"), where="result")
    except ValueError as problem:
        hint = f"{problem} Recreate it with tidegate study {study.name}."
        raise InputError("record", expected=expected, got=path, hint=hint) from None


def page_of(study: Study[Any, Any], record: dict[str, Any], result: Any) -> Page:
    """Return the whole page: what was found, what it was found from, and how to do it again."""
    found = Section(title="What holds", lead=study.claim, panels=(Prose(paragraphs=(record["finding"],)),))
    command = format_command(study.name, result.options, full=study.options, quick=study.quick)
    versions = "\n".join(f"{name}: {value}" for name, value in record["environment"].items())
    again = Section(
        title="To do it again",
        panels=(Snippet(title="Command", text=command), Snippet(title="Versions", text=versions)),
    )
    return Page(
        title=study.name,
        summary=study.question,
        sections=(found, *study.view(result), again),
        data=record,
    )
