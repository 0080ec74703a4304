"""Curvature by layer before and after training, over seeds, as panels."""

from __future__ import annotations

import numpy as np

from tidegate.lab.models.curvature_panels import curvature_panels
from tidegate.lab.studies.trained_layers.run import Mean, TrainedLayersResult, magnitude, positive_share, ratio
from tidegate.report.page import CellValue, Column, Lines, Section, Series, Table


def view(result: TrainedLayersResult) -> tuple[Section, ...]:
    """Show means over seeds, then the panels of the first seed's models at the start and at the end."""
    moments = {"at the start": False, f"after {result.options.steps} steps": True}
    first = result.options.seed
    return (
        Section(
            title="Over seeds",
            lead="Geometric means of the median |K|, with 95 % intervals over seeds, each by itself.",
            panels=(*(_lines(result, when, trained) for when, trained in moments.items()), _table(result)),
        ),
        *(
            Section(
                title=f"Seed {first} {when}",
                panels=curvature_panels(
                    {
                        gate: each.curvature
                        for gate in result.options.gates
                        for each in result.of(gate, trained=trained)
                        if each.seed == first
                    }
                ),
            )
            for when, trained in moments.items()
        ),
    )


def _lines(result: TrainedLayersResult, when: str, trained: bool) -> Lines:
    layers = range(result.options.num_layers)
    found = {
        gate: [magnitude(result.of(gate, trained=trained), layer=layer) for layer in layers]
        for gate in result.options.gates
    }
    return Lines(
        title=f"How strongly slices bend {when}, to either side",
        alternative="; ".join(f"{gate}: {', '.join(map(str, means))}" for gate, means in found.items()),
        x_label="layer",
        y_label="median |K|, relative",
        series=tuple(
            Series(
                label=gate,
                group=gate,
                x=tuple(map(float, layers)),
                y=tuple(mean.value for mean in means),
                low=tuple(mean.low for mean in means),
                high=tuple(mean.high for mean in means),
            )
            for gate, means in found.items()
        ),
        log_y=True,
    )


def _table(result: TrainedLayersResult) -> Table:
    names = ("|K| at the start", "|K| in the end", "end over start", "positive in the end", "|K| over none's")
    columns = (
        Column(title="gate"),
        Column(title="loss in the end", unit="nats a byte", digits=3, better="low"),
        *(Column(title=title, digits=3) for name in names for title in (name, "low", "high")),
    )
    rows = tuple(_row(result, gate) for gate in result.options.gates)
    return Table(title="By gate, all layers together", columns=columns, rows=rows)


def _row(result: TrainedLayersResult, gate: str) -> tuple[CellValue, ...]:
    start, end, plain = result.of(gate, trained=False), result.of(gate, trained=True), result.of("none", trained=True)
    means = [magnitude(start), magnitude(end), ratio(end, start), positive_share(end)]
    means.append(ratio(end, plain) if plain and gate != "none" else Mean(value=1.0, low=None, high=None))
    numbers = [number for mean in means for number in (mean.value, mean.low, mean.high)]
    return (gate, float(np.mean([each.loss for each in end])), *numbers)
