"""`tidegate rates`: the study `rates`, with its most used options as options of the command, and a table of slopes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from tidegate.cli.console import new_console
from tidegate.cli.errors import stop
from tidegate.cli.options import JsonOption, QuietOption
from tidegate.cli.study import answer_study

if TYPE_CHECKING:
    from tidegate.lab.studies.rates import RatesResult


def rates(
    placements: Annotated[
        str,
        typer.Option(
            help="Where the gate stands, several parted by commas: none, query, key, dense, g1, g2, bma, bma-query."
        ),
    ] = "none,query,key,dense,g1,g2,bma,bma-query",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and replicates, and no surplus experts: half a minute.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of data and starts; the same seed gives the same numbers.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = Path("rates"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate the experts of an attention head from more and more data, and write a page of what can be told apart.

    The study `rates`, which has more options: `tidegate study rates --options`. Some minutes on two cores. The page
    has slopes with intervals and verdicts, the regression error of the same fits, flat directions of every gate,
    theory beside measurement, and the limits.
    """
    from tidegate.lab.studies.rates import STUDY

    # The options check the words themselves.
    chosen: Any = tuple(word.strip() for word in placements.split(",") if word.strip())
    full_or_quick = STUDY.quick if quick and STUDY.quick is not None else STUDY.options
    try:
        options = replace(full_or_quick, placements=chosen, seed=seed)
    except ValueError as problem:
        stop(f"--{problem}")
    result = answer_study(STUDY, options, out, as_json=as_json, quiet=quiet)
    if not as_json:
        _print_slopes(result)


def _print_slopes(result: RatesResult) -> None:
    table = Table(
        title="Slopes of errors in the sample size",
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("gate", "experts", "slope", "95 % interval", "regression", "95 % interval"):
        table.add_column(heading, justify="left" if heading in ("gate", "experts") else "right", no_wrap=True)
    for found in result.rates:
        expert, regression = found.slopes["expert"], found.slopes["regression"]
        numbers = (
            text
            for slope in (expert, regression)
            for text in (f"{slope.slope:+.3f}", f"{slope.low:+.3f}…{slope.high:+.3f}")
        )
        table.add_row(found.placement, expert.verdict, *numbers)
    new_console().print(table)
