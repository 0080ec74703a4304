"""`tidegate study`: one question, answered anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidegate.cli.errors import INTERRUPTED, stop
from tidegate.cli.folders import require_no_comparison, require_writable
from tidegate.cli.parts import parts_display


def study(
    name: Annotated[str, typer.Argument(help="Which one; `list` names them with their questions.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write; studies/NAME by default.")] = None,
    again: Annotated[
        Path | None,
        typer.Option("--from", help="A record to draw and report from, instead of the work.", show_default=False),
    ] = None,
) -> None:
    """Answer one question by a computation of some minutes: its record, its page and its figures."""
    from tidegate.lab.studies.catalogue import STUDIES
    from tidegate.lab.studies.drawing import save_figures
    from tidegate.lab.studies.study import page_of, read_record, record_of, save_record
    from tidegate.report import write_page

    console = Console(highlight=False)
    if name == "list":
        for known in STUDIES.values():
            console.print(f"{known.name}: {known.question}", soft_wrap=True)
        return
    if name not in STUDIES:
        stop(f"there is no study {name!r}. Known: {', '.join(STUDIES)}.")
    chosen, folder = STUDIES[name], Path("studies") / name if out is None else out
    try:
        require_writable(folder)
        require_no_comparison(folder)
        if again is None:
            with parts_display(Console(stderr=True, highlight=False), name, "parts") as tell:
                result = chosen.run(tell=tell)
        else:
            result = read_record(chosen, again)
        record = record_of(chosen, result)
        folder.mkdir(parents=True, exist_ok=True)
        save_record(record, folder / f"{name}.json")
        save_figures(chosen.draw(result), folder)
        page = write_page(page_of(chosen, record, result), folder)
    except (ValueError, OSError, KeyError) as problem:
        stop(problem)
    except KeyboardInterrupt:
        stop("nothing was written.", code=INTERRUPTED)
    console.print(record["finding"], soft_wrap=True)
    console.print(f"The page: {page}", soft_wrap=True)
