"""What a study is: a question, a function that answers it, and the record, page and figures of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tidegate._json import read_as
from tidegate.lab.training.machine import environment
from tidegate.report.page import Page, Prose, Section, Snippet


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question with its answer in the making; the answer is a frozen dataclass that goes through JSON."""

    name: str
    question: str
    run: Callable[..., Any]
    """Does the work, at full size; the same numbers each time on one machine. It takes `tell`, a `Tell`."""
    result: type
    """The class of what `run` returns."""
    finding: Callable[[Any], str]
    """What holds, and what does not, in sentences made from the numbers."""
    sections: Callable[[Any], tuple[Section, ...]]
    draw: Callable[[Any], dict[str, Figure]]
    """Figures by file name, whose ending is the format."""


def record_of(study: Study, result: Any) -> dict[str, Any]:
    """The answer as JSON values, with the versions that it was made by."""
    return {
        "study": study.name,
        "question": study.question,
        "finding": study.finding(result),
        "result": asdict(result),
        "environment": environment(),
    }


def save_record(record: dict[str, Any], path: Path) -> None:
    """Write a record; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(record), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    path.write_text(json.dumps(rounded, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read_record(study: Study, path: Path) -> Any:
    """The answer that a record holds; a `ValueError` if it is of another study."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("study") != study.name:
        raise ValueError(f"{path} must be a record of {study.name}; it is one of {record.get('study')!r}.")
    return read_as(study.result, record["result"])


def page_of(study: Study, record: dict[str, Any], result: Any) -> Page:
    """The whole page: what was found, and what it was found from."""
    found = Section(title="What holds", panels=(Prose(paragraphs=(record["finding"],)),))
    versions = "\n".join(f"{name}: {value}" for name, value in record["environment"].items())
    again = Section(
        title="To do it again",
        panels=(
            Snippet(title="Command", text=f"tidegate study {study.name}"),
            Snippet(title="Versions", text=versions),
        ),
    )
    return Page(
        title=study.name,
        summary=study.question,
        sections=(found, *study.sections(result), again),
        data=record,
    )
