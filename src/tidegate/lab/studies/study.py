"""Studies: one question with a function that answers it, its record and its page."""

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
from tidegate.report.page import Page, Prose, Section, Snippet, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Study(Generic[_Options, _Result]):
    """One question. Options and result are frozen dataclasses for JSON; a result has its `options`."""

    name: str
    question: str
    claim: str
    """The claim under test, its source, and how this study differs from it."""
    options: _Options
    """Options of the full study."""
    quick: _Options | None = None
    """Options of a version that takes less than a minute; None if there is none."""
    result: type[_Result]
    run: Callable[..., _Result]
    """Called as `run(options, tell=...)`; the same options give the same numbers on one machine."""
    finding: Callable[[_Result], str]
    """Returns the conclusion in sentences made from the numbers."""
    view: Callable[[_Result], tuple[Section, ...]]
    """Returns the sections of the page."""
    figures: Callable[[_Result], dict[str, Figure]] | None = None
    """Returns figures that no panel can draw, by file name; the suffix is the format."""
    table: Callable[[_Result], Table] | None = None
    """Returns a table of text that the command line prints below the finding."""


def record_of(study: Study[Any, _Result], result: _Result) -> dict[str, Any]:
    """Return the result as JSON values, with its finding and the versions of the software."""
    return {
        "study": study.name,
        "question": study.question,
        "finding": study.finding(result),
        "result": asdict(result),  # pyright: ignore[reportArgumentType]: a result is a dataclass
        "environment": environment(),
    }


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write a record with a checksum and numbers of six digits; create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(record), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    text = json.dumps(add_checksum(rounded), indent=1, ensure_ascii=False, allow_nan=False)
    write_content(path, f"{text}\n".encode())


def read_record(study: Study[Any, _Result], path: Path) -> _Result:
    """Return the result of a record.

    Raises:
        InputError: The record is damaged, or belongs to another study.
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
    """Return the page: the finding, the sections of the view, and how to reproduce it."""
    found = Section(title="Finding", lead=study.claim, panels=(Prose(paragraphs=(record["finding"],)),))
    command = format_command(study.name, result.options, full=study.options, quick=study.quick)
    versions = "\n".join(f"{name}: {value}" for name, value in record["environment"].items())
    again = Section(
        title="Reproduce", panels=(Snippet(title="Command", text=command), Snippet(title="Versions", text=versions))
    )
    return Page(title=study.name, summary=study.question, sections=(found, *study.view(result), again), data=record)
