"""`tidegate curvature`: how the layers of a trained model bend."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.table import Table

from tidegate.cli.console import new_console, print_json
from tidegate.cli.folders import require_apart, require_no_comparison, require_writable
from tidegate.cli.options import DataOption, FieldOption, GatesOption, JsonOption, ModelArgument, note_unread
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.training.measurements import ModelCurvature


def curvature(
    model: ModelArgument,
    data: DataOption = None,
    gates: GatesOption = None,
    field: FieldOption = None,
    part: Annotated[
        Literal["attention", "block"], typer.Option(help="Attention alone, or whole blocks.")
    ] = "attention",
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 32,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    positions: Annotated[int, typer.Option(min=1, help="Positions of each sequence.")] = 4,
    planes: Annotated[int, typer.Option(min=1, help="Planes at each position.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the planes.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("curvature"),
    as_json: JsonOption = False,
) -> None:
    """Measure the slice curvature of every layer of a trained model, and write a page with a figure and a table."""
    from tidegate.lab.models.curvature import model_curvature
    from tidegate.lab.models.curvature_panels import curvature_page
    from tidegate.lab.models.language_models import load_language_model, token_windows
    from tidegate.lab.training.measurements import Sampling
    from tidegate.report import write_page

    command = shlex.join(["tidegate", *sys.argv[1:]])
    require_writable(out)
    require_apart(out, data)
    require_no_comparison(out)
    loaded = load_language_model(model, gates=gates)
    note_unread(loaded)
    windows = token_windows(loaded, data, length=length, count=sequences, field=field)
    sampling = Sampling(part=part, num_positions=positions, num_planes=planes, seed=seed)
    with display(new_console(stderr=True), quiet=False) as shown:
        measured = model_curvature(loaded, windows, sampling, tell=shown.show)
    page = curvature_page(measured, command=command)
    written = write_page(page, out)
    if as_json:
        print_json({"page": str(written), "results": page.data})
        return
    console = new_console()
    console.print(_table(measured))
    console.print(f"The page: {written}", soft_wrap=True)


def _table(measured: ModelCurvature) -> Table:
    what = "attention" if measured.sampling.part == "attention" else "blocks"
    table = Table(
        title=f"Relative slice curvature K of {measured.model}, {what}: quantiles, median |K| and share above 0",
        title_justify="left",
        title_style="bold",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("layer", "5 %", "25 %", "median", "75 %", "95 %", "|K|", "K > 0"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in measured.layers:
        table.add_row(
            str(layer.layer),
            *(f"{value:+.3g}" for value in layer.quantiles),
            f"{layer.magnitude:.3g}",
            f"{layer.positive:.2f}",
        )
    return table
