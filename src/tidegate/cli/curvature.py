"""`tidegate curvature`: the curvature of each layer of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from tidegate.cli.console import finish_page, new_console, new_table
from tidegate.cli.folders import require_page_folder
from tidegate.cli.options import GatedModelAndText, Output, note_unread, option, this_command, verb
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.training.measurements import ModelCurvature


@dataclass(frozen=True, kw_only=True)
class CurvatureOptions(GatedModelAndText, Output):
    """Options of `tidegate curvature`."""

    part: Literal["attention", "block"] = option("attention", "Measure attention layers only, or whole blocks.")
    length: int = option(32, "Sequence length in tokens.", min=2)
    sequences: int = option(4, "Number of sequences.", min=1)
    positions: int = option(4, "Positions per sequence.", min=1)
    planes: int = option(16, "Planes per position.", min=1)
    seed: int = option(0, "Random seed for the planes.", min=0)
    out: Path = option(Path("curvature"), "Folder for the page.")


@verb
def curvature(options: CurvatureOptions) -> None:
    """Measure the slice curvature of every layer of a trained model, and write a page with a figure and a table.

    Example: tidegate curvature model --data notes.txt
    """
    from tidegate.lab.models.curvature import model_curvature
    from tidegate.lab.models.curvature_panels import curvature_page
    from tidegate.lab.models.language_models import load_language_model, token_windows
    from tidegate.lab.training.measurements import Sampling
    from tidegate.report import write_page

    require_page_folder(options.out, options.data)
    loaded = load_language_model(options.model, gates=options.gates)
    note_unread(loaded)
    windows = token_windows(loaded, options.data, length=options.length, count=options.sequences, field=options.field)
    sampling = Sampling(
        part=options.part, num_positions=options.positions, num_planes=options.planes, seed=options.seed
    )
    with display(new_console(stderr=True), quiet=options.quiet) as tell:
        measured = model_curvature(loaded, windows, sampling, tell=tell)
    page = curvature_page(measured, command=this_command())
    finish_page(write_page(page, options.out), page.data, as_json=options.as_json, result=_table(measured))


def _table(measured: ModelCurvature) -> Table:
    part = "attention" if measured.sampling.part == "attention" else "blocks"
    title = f"Relative slice curvature K of {measured.model}, {part}: quantiles, median |K|, fraction above 0"
    table = new_table(title)
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
