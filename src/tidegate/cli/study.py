"""`tidegate study`: one question, answered anew."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate._files import irregular_kind
from tidegate.cli.console import new_console, print_json
from tidegate.cli.errors import stop
from tidegate.cli.folders import require_no_comparison, require_writable
from tidegate.cli.options import JsonOption, QuietOption
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.studies.study import Study


def study(
    name: Annotated[str, typer.Argument(help="Which one; `list` names them with their questions.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change an option of the study; may be repeated. --options shows them all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less work, for a first look, if the study has such a version.")
    ] = False,
    show_options: Annotated[
        bool, typer.Option("--options", help="Show the options as they would be, and do nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write; studies/NAME by default.")] = None,
    again: Annotated[
        Path | None,
        typer.Option("--from", help="A record to draw and report from, instead of the work.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Answer one question by a computation of some minutes: its record, its page and its pictures."""
    from tidegate.lab.studies.catalogue import STUDIES
    from tidegate.lab.studies.options import set_options, settings_of

    console = new_console()
    if name == "list" and as_json:
        print_json([{"name": known.name, "question": known.question} for known in STUDIES.values()])
        return
    if name == "list":
        for known in STUDIES.values():
            console.print(f"{known.name}: {known.question}", soft_wrap=True)
        return
    if name not in STUDIES:
        stop(f"there is no study {name!r}. Known: {', '.join(STUDIES)}.")
    chosen = STUDIES[name]
    if quick and chosen.quick is None:
        stop(f"{name} has no quick version. Choose its size by --set; --options shows what can be set.")
    if again is not None and (quick or settings):
        stop("--from draws from a record, which has its options: leave out --quick and --set.")
    try:
        options = set_options(chosen.quick if quick else chosen.options, settings or [])
    except ValueError as problem:
        stop(f"--set: {problem}")
    if show_options and as_json:
        print_json(asdict(options))
        return
    if show_options:
        console.print("\n".join(settings_of(options)), soft_wrap=True)
        return
    folder = Path("studies") / name if out is None else out
    answer_study(chosen, options, folder, record=again, as_json=as_json, quiet=quiet)


def answer_study(
    study: Study[Any, Any],
    options: Any,
    folder: Path,
    *,
    record: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> Any:
    """Answer a study, or read its answer from a record; write record, page and pictures, print the finding.

    Returns the answer.
    """
    from tidegate.lab.studies.drawing import save_figures
    from tidegate.lab.studies.study import page_of, read_record, record_of, save_record
    from tidegate.report import write_page

    require_writable(folder)
    require_no_comparison(folder)
    if record is None:
        with display(new_console(stderr=True), quiet=quiet) as shown:
            result = study.run(options, tell=shown.show)
    else:
        if kind := irregular_kind(record):
            raise ValueError(f"--from {record} is {kind} and no file. Name the {study.name}.json of a study.")
        result = read_record(study, record)
    values = record_of(study, result)
    save_record(values, folder / f"{study.name}.json")
    if study.figures is not None:
        save_figures(study.figures(result), folder)
    page = write_page(page_of(study, values, result), folder)
    if as_json:
        print_json({"page": str(page), "results": values})
        return result
    console = new_console()
    console.print(values["finding"], soft_wrap=True)
    console.print(f"The page: {page}", soft_wrap=True)
    return result
