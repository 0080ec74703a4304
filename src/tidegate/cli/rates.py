"""`tidegate rates`: which experts of a head can be estimated, by where the gate stands."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidegate.cli.errors import INTERRUPTED, stop
from tidegate.cli.folders import require_no_comparison, require_writable

if TYPE_CHECKING:
    from tidegate.lab.studies.rates.result import RateSettings, RatesResult
    from tidegate.lab.studies.rates.run import Step

_SECONDS_BETWEEN_LINES = 10.0


def rates(
    positions: Annotated[
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
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the result alone.")] = False,
) -> None:
    """Estimate the experts of an attention head from more and more data, and write a page of what can be told apart.

    Some minutes on two cores. The page has slopes with intervals and verdicts, the regression error of the same fits,
    flat directions of every gate, theory beside measurement, and the limits.
    """
    console = Console(highlight=False)
    try:
        settings = _settings(positions, quick=quick, seed=seed)
        require_writable(out)
        require_no_comparison(out)

        from tidegate.lab.studies.drawing import save_figures
        from tidegate.lab.studies.rates.figures import draw
        from tidegate.lab.studies.rates.page import rates_page
        from tidegate.lab.studies.rates.run import rates as run_study
        from tidegate.lab.training.machine import environment
        from tidegate.report import write_page

        with _display(console, quiet=quiet) as show:
            result = run_study(settings, tell=show)
        command = shlex.join(["tidegate", *sys.argv[1:]])
        page = write_page(rates_page(result, command=command, environment=environment()), out)
        save_figures(draw(result), out)
    except (ValueError, OSError, ImportError) as problem:
        stop(problem)
    except KeyboardInterrupt:
        stop("nothing was written.", code=INTERRUPTED)
    _print_slopes(console, result)
    console.print(f"The page: {page}", soft_wrap=True)


def _settings(positions: str, *, quick: bool, seed: int) -> RateSettings:
    from tidegate.lab.studies.rates.result import RateSettings
    from tidegate.lab.studies.rates.run import QUICK

    # The settings check the words themselves.
    chosen: Any = tuple(word.strip() for word in positions.split(",") if word.strip())
    try:
        return replace(QUICK if quick else RateSettings(), positions=chosen, seed=seed)
    except ValueError as problem:
        raise ValueError(f"--{problem}") from None


@contextmanager
def _display(console: Console, *, quiet: bool) -> Generator[Callable[[Step], None]]:
    """Bars if the console is a terminal, lines if not, nothing if it is to be quiet."""
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        with Progress(*columns, TextColumn("{task.fields[item]}"), TimeElapsedColumn(), console=console) as bars:
            yield _bars(bars)
    else:
        yield _lines(console)


def _bars(bars: Progress) -> Callable[[Step], None]:
    tasks: dict[str, TaskID] = {}

    def show(step: Step) -> None:
        if step.part not in tasks:
            tasks[step.part] = bars.add_task(step.part, total=step.total, item="")
        item = step.item if step.done < step.total else ""
        bars.update(tasks[step.part], completed=step.done, item=item)

    return show


def _lines(console: Console) -> Callable[[Step], None]:
    last = time.monotonic()

    def show(step: Step) -> None:
        nonlocal last
        if step.done == step.total or time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            console.print(f"{step.part}: {step.done} of {step.total} ({step.item})", soft_wrap=True, markup=False)

    return show


def _print_slopes(console: Console, result: RatesResult) -> None:
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
        table.add_row(found.position, expert.verdict, *numbers)
    console.print(table)
