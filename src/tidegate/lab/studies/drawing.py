"""Make, label and save the figures of studies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from tidegate._files import write_atomically

GREY = "#8A8A8A"


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of that many inches, without pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


def save_figures(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write figures under their file names; the same figure gives the same bytes, and an SVG keeps its text as text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        write_atomically(folder / name, partial(_save_figure, figure, kind=Path(name).suffix.removeprefix(".")))
    return [folder / name for name in figures]


def _save_figure(figure: Figure, file: Path, *, kind: str) -> None:
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tidegate"}):
        # Compute the layout once: each further pass would move things a little.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figure.savefig(file, format=kind, dpi=110, metadata=metadata)


def label_axes(axes: Any, *, title: str = "", x: str = "", y: str = "") -> None:
    """Label the axes, draw a light grid, and remove the upper and right spines."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
