"""The verbs. Exit codes: 0 for success, 1 for failed runs, 2 for bad input, 130 after Ctrl-C."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand, TyperGroup

from tidegate.cli.compare import compare
from tidegate.cli.curvature import curvature
from tidegate.cli.errors import errors_in_one_line
from tidegate.cli.evaluate import evaluate
from tidegate.cli.explore import explore
from tidegate.cli.export import export
from tidegate.cli.generate import generate
from tidegate.cli.observe import observe
from tidegate.cli.report import report
from tidegate.cli.study import study
from tidegate.cli.tokenize import tokenize
from tidegate.cli.train import train


@final
class _Verb(TyperCommand):
    """A verb whose `--help`, like its other flags, is listed without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.metavar = ""
        return found


@final
class _Verbs(TyperGroup):
    """The group of verbs; it reports errors in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the verb; show the help if there are none."""
        if not args:
            return super().parse_args(ctx, args)
        with errors_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the verb and run it."""
        with errors_in_one_line(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    name="tidegate",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for run_verb in (compare, train, tokenize, generate, evaluate, export, report, study, curvature, observe, explore):
    app.command(cls=_Verb)(run_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidegate {version('tidegate')}")
        raise typer.Exit


@app.callback()
def _verbs(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show version and exit.", metavar=""),
    ] = False,
) -> None:
    """Gated attention: train variants under equal conditions and report their differences with intervals."""
