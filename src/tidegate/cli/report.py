"""`tidegate report`: regenerate the page of a comparison from its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate._validation import InputError
from tidegate.cli.console import finish_page
from tidegate.cli.errors import stop
from tidegate.cli.options import JsonOutput, argument, option, verb


@dataclass(frozen=True, kw_only=True)
class ReportOptions(JsonOutput):
    """Options of `tidegate report`."""

    folder: Path = argument("Output folder of a comparison.")
    out: Path | None = option(None, "Folder for the page. Default: the same folder.")


@verb
def report(options: ReportOptions) -> None:
    """Regenerate the report of a comparison from its records: report.html, report.md and results.json."""
    from tidegate.lab.compare.page import comparison_page
    from tidegate.lab.compare.summary import summarise
    from tidegate.lab.training.records import RecordFile, records_path
    from tidegate.report import write_page

    path = records_path(options.folder)
    if not path.is_file():
        hint = f"{path} does not exist."
        raise InputError("folder", expected="the output folder of a comparison", got=options.folder, hint=hint)
    lines = RecordFile(path).read()
    try:
        summary = summarise(lines)
    except ValueError as problem:
        stop(f"{path}: {problem}")
    page = comparison_page(summary)
    finish_page(write_page(page, options.out or options.folder), page.data, as_json=options.as_json)
