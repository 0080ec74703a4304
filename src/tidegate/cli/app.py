"""The verbs, and how they end: 0 if all went well, 1 if runs failed, 2 for bad input, 130 after Ctrl-C."""

from __future__ import annotations

import typer

from tidegate.cli.compare import compare
from tidegate.cli.curvature import curvature
from tidegate.cli.observe import observe
from tidegate.cli.rates import rates
from tidegate.cli.report import report
from tidegate.cli.study import study

__all__ = ["app"]

app = typer.Typer(
    name="tidegate",
    help="Gated attention: train variants under equal conditions, and see what differs, by how much, how surely.",
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


@app.callback()
def _verbs() -> None:
    """Keep verbs verbs, however many there are."""
