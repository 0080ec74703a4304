"""`tidegate study`: built-in experiments of a few minutes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from tidegate._files import nonregular_file_type
from tidegate._validation import InputError
from tidegate.cli.console import finish_page, new_console, new_table, print_json
from tidegate.cli.errors import stop
from tidegate.cli.folders import require_page_folder
from tidegate.cli.options import Output, argument, option, verb
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.studies.study import Study


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Output):
    """Options of `tidegate study`."""

    name: str = argument("Name of the study; `list` shows all of them with their questions.")
    settings: list[str] | None = option(
        None, "Set an option of the study (repeatable); --options lists them.", "--set", metavar="NAME=VALUE"
    )
    quick: bool = option(False, "Run the smaller version for a first look, if the study has one.", "--quick")
    show_options: bool = option(False, "Print the options of the study and exit.", "--options")
    out: Path | None = option(None, "Output folder. Default: studies/NAME.")
    again: Path | None = option(None, "Regenerate page and figures from this record instead of running.", "--from")


@verb
def study(options: StudyOptions) -> None:
    """Run one of the built-in experiments (a few minutes); write its data, a page and figures.

    Example: tidegate study list
    """
    from tidegate.lab.studies.catalogue import QUESTIONS, STUDIES

    console, name = new_console(), options.name
    if name == "list":
        if options.as_json:
            print_json([{"name": known, "question": question} for known, question in QUESTIONS.items()])
        else:
            console.print("\n".join(map(": ".join, QUESTIONS.items())), soft_wrap=True)
        return
    if name not in QUESTIONS:
        raise InputError("name", expected=f"one of {', '.join(QUESTIONS)}", got=name)
    from tidegate.lab.studies.options import set_options, settings_of

    chosen: Any = STUDIES[name]
    if options.quick and chosen.quick is None:
        raise InputError("quick", expected="left out", hint=f"{name} has no quick version; reduce it with --set.")
    if options.again is not None and (options.quick or options.settings):
        raise InputError("again", expected="given without --quick and --set", hint="The record contains the options.")
    try:
        settings: Any = set_options(chosen.quick if options.quick else chosen.options, options.settings or [])
    except ValueError as problem:
        stop(f"--set: {problem}")
    if options.show_options:
        if options.as_json:
            print_json(asdict(settings))
        else:
            console.print("\n".join(settings_of(settings)), soft_wrap=True)
        return
    _answer(chosen, settings, options)


def _answer(chosen: Study[Any, Any], settings: Any, options: StudyOptions) -> None:
    """Run the study or read its record; write record, page and pictures, and print the finding."""
    from tidegate.lab.studies.drawing import save_figures
    from tidegate.lab.studies.study import page_of, read_record, record_of, save_record
    from tidegate.report import write_page

    folder = options.out or Path("studies") / chosen.name
    require_page_folder(folder)
    if options.again is None:
        with display(new_console(stderr=True), quiet=options.quiet) as tell:
            result = chosen.run(settings, tell=tell)
    else:
        if kind := nonregular_file_type(options.again):
            expected = f"the {chosen.name}.json of a study"
            raise InputError("again", expected=expected, got=options.again, hint=f"It is {kind}.")
        result = read_record(chosen, options.again)
    values = record_of(chosen, result)
    save_record(values, folder / f"{chosen.name}.json")
    if chosen.figures is not None:
        save_figures(chosen.figures(result), folder)
    page = write_page(page_of(chosen, values, result), folder)
    shown: RenderableType = values["finding"]
    if chosen.table is not None:
        table = chosen.table(result)
        grid = new_table(table.title)
        for column in table.columns:
            grid.add_column(column.title, no_wrap=True)
        for row in table.rows:
            grid.add_row(*map(str, row))
        shown = Group(shown, "", grid)
    finish_page(page, values, as_json=options.as_json, result=shown)
