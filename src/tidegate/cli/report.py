"""`tidegate report`: the page, from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import stop
from tidegate.cli.options import JsonOption


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that a comparison wrote to.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write the page; the same folder by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the page of a comparison anew, from its records: report.html, report.md and results.json."""
    from tidegate.lab.compare.page import comparison_page
    from tidegate.lab.compare.summary import summarise
    from tidegate.lab.training.records import RecordFile, records_path
    from tidegate.report import write_page

    path = records_path(folder)
    if not path.is_file():
        stop(f"{folder} has no records: {path} is not there. Give the folder that was --out of a comparison.")
    lines = RecordFile(path).read()
    try:
        summary = summarise(lines)
    except ValueError as problem:
        stop(f"{path}: {problem}")
    page = comparison_page(summary)
    written = write_page(page, folder if out is None else out)
    if as_json:
        print_json({"page": str(written), "results": page.data})
        return
    new_console().print(f"The page: {written}", soft_wrap=True)
