"""The verbs, and how they end: 0 if all went well, 1 if runs failed, 2 for bad input, 130 after Ctrl-C."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from tidegate.cli.compare import compare
from tidegate.cli.curvature import curvature
from tidegate.cli.observe import observe
from tidegate.cli.rates import rates
from tidegate.cli.report import report
from tidegate.cli.study import study

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(compare)
app.command()(rates)
app.command()(report)
app.command()(study)
app.command()(curvature)
app.command()(observe)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidegate {version('tidegate')}")
        raise typer.Exit


@app.callback()
def _verbs(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Gated attention: train variants under equal conditions, and see what differs, by how much, how surely."""
