"""Curvature by layer before and after training, as panels and a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tidegate.lab.models.curvature_panels import curvature_panels
from tidegate.lab.studies.drawing import COLOURS, GREY, label_axes, new_figure
from tidegate.lab.studies.study import StudyView
from tidegate.lab.studies.trained_layers.run import Snapshot, TrainedLayersResult
from tidegate.report.page import Section


def view(result: TrainedLayersResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    return StudyView(sections=_sections(result), figures=_figures(result))


def _sections(result: TrainedLayersResult) -> tuple[Section, ...]:
    """The panels of all models at the start, and at the end."""
    moments = {"At the start": 0, f"After {result.options.steps} steps": result.options.steps}
    return tuple(
        Section(
            title=title,
            panels=curvature_panels({each.gate: each.curvature for each in result.measured if each.steps == steps}),
        )
        for title, steps in moments.items()
    )


def _figures(result: TrainedLayersResult) -> dict[str, Figure]:
    """Quantiles of slice curvature by layer, one plot a moment."""
    figure = new_figure(8.6, 3.0)
    all_axes: Any = figure.subplots(1, 2, sharey=True)
    for axes, steps in zip(all_axes, (0, result.options.steps), strict=True):
        when = f"after {steps} steps" if steps else "at the start"
        label_axes(axes, title=f"Attention layers {when}", x="layer", y="relative slice curvature" if not steps else "")
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_yscale("symlog", linthresh=1e-3, linscale=0.5)
        axes.set_xticks(range(result.options.num_layers))
        for place, each in enumerate(one for one in result.measured if one.steps == steps):
            _draw_model(axes, each, place, len(result.options.gates))
    handles, labels = all_axes[1].get_legend_handles_labels()
    all_axes[0].legend(
        handles, [f"{label} in the end" for label in labels], fontsize=7, frameon=False, loc="upper left"
    )
    return {"trained-layers.svg": figure}


def _draw_model(axes: Any, each: Snapshot, place: int, count: int) -> None:
    colour = "black" if each.gate == "none" else COLOURS[place]
    quantiles = np.array([layer.quantiles for layer in each.curvature.layers])
    x = np.arange(len(quantiles)) + 0.12 * (place - (count - 1) / 2)
    axes.vlines(x, quantiles[:, 0], quantiles[:, 4], color=colour, linewidth=0.9)
    axes.vlines(x, quantiles[:, 1], quantiles[:, 3], color=colour, linewidth=2.4)
    axes.plot(x, quantiles[:, 2], "o", color=colour, markersize=3.5, label=f"{each.gate}, loss {each.loss:.2f}")
