"""Slice curvature by layer, for one model or several side by side: a figure and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from tidegate.lab.training.measurements import ModelCurvature
from tidegate.report.page import Column, Lines, Page, Panel, Prose, Section, Series, Snippet, Table, View, Views


def curvature_panels(measured: Mapping[str, ModelCurvature]) -> tuple[Panel, ...]:
    """Curves over layers and a table, for models by their labels; none for no models."""
    if not measured:
        return ()
    views = (
        View(label="curvature", panel=_curves(measured)),
        View(label="magnitude", panel=_magnitudes(measured)),
        View(label="positive share", panel=_shares(measured)),
    )
    return Views(title="Slice curvature by layer", views=views), _table(measured)


def curvature_page(measured: ModelCurvature, *, command: str) -> Page:
    """The page of one model."""
    sampling = measured.sampling
    what = "attention layers" if sampling.part == "attention" else "blocks"
    return Page(
        title=f"Curvature of {measured.model}",
        summary=f"Slice curvature of the {len(measured.layers)} {what} of {measured.model}, on "
        f"{measured.num_sequences} sequences of {measured.length} tokens: {measured.layers[0].count} random planes a "
        "layer.",
        sections=(
            Section(title="By layer", panels=curvature_panels({measured.model: measured})),
            Section(title="How to read it", panels=(Prose(paragraphs=_READING),)),
            Section(title="To do it again", panels=(Snippet(title="Command", text=command),)),
        ),
        data=asdict(measured),
    )


def decimals(measured: Iterable[ModelCurvature]) -> int:
    """Decimals that show three digits of the layer that bends least; between 3 and 9."""
    bent = [layer.magnitude for one in measured for layer in one.layers if layer.magnitude > 0]
    return min(max(2 - math.floor(math.log10(min(bent))), 3), 9) if bent else 3


_READING = (
    "A layer is read as a map of the input at one position, all others staying, to the outputs at that position and "
    "all that follow. A slice is the surface that two random directions of the input make; its curvature is a weaker "
    "statement than that of the whole manifold.",
    "Curvature is relative: K times the mean squared length of an output. A sphere about the origin through the output "
    "has 1, a plane, a cylinder or a cone has 0, a saddle is negative.",
)


def _layers(one: ModelCurvature) -> tuple[float, ...]:
    return tuple(float(layer.layer) for layer in one.layers)


def _curves(measured: Mapping[str, ModelCurvature]) -> Lines:
    series = tuple(
        Series(
            label=label,
            group=label,
            x=_layers(one),
            y=tuple(layer.quantiles[2] for layer in one.layers),
            low=tuple(layer.quantiles[1] for layer in one.layers),
            high=tuple(layer.quantiles[3] for layer in one.layers),
        )
        for label, one in measured.items()
    )
    return Lines(
        title="Median curvature of slices, with quartiles",
        alternative=_alternative(measured, 2),
        x_label="layer",
        y_label="relative curvature",
        series=series,
        zero_line=True,
    )


def _magnitudes(measured: Mapping[str, ModelCurvature]) -> Lines:
    series = tuple(
        Series(label=label, group=label, x=_layers(one), y=tuple(layer.magnitude for layer in one.layers))
        for label, one in measured.items()
    )
    return Lines(
        title="How strongly slices bend, to either side",
        alternative="One line a model over layers: the median of the absolute relative curvature.",
        x_label="layer",
        y_label="median |K|, relative",
        series=series,
        log_y=all(layer.magnitude > 0 for one in measured.values() for layer in one.layers),
    )


def _shares(measured: Mapping[str, ModelCurvature]) -> Lines:
    series = tuple(
        Series(label=label, group=label, x=_layers(one), y=tuple(layer.positive for layer in one.layers))
        for label, one in measured.items()
    )
    return Lines(
        title="Share of slices with positive curvature",
        alternative="One line a model over layers: the share of slices whose curvature is above 0.",
        x_label="layer",
        y_label="share",
        series=series,
    )


def _alternative(measured: Mapping[str, ModelCurvature], place: int) -> str:
    parts = (
        f"{label}: {', '.join(f'{layer.quantiles[place]:.3g}' for layer in one.layers)}"
        for label, one in measured.items()
    )
    return f"Medians by layer. {'; '.join(parts)}."


def _table(measured: Mapping[str, ModelCurvature]) -> Table:
    digits = decimals(measured.values())
    columns = (
        Column(title="model"),
        Column(title="layer"),
        Column(title="planes"),
        *(Column(title=name, digits=digits, signed=True) for name in ("5 %", "25 %", "median", "75 %", "95 %")),
        Column(title="median |K|", digits=digits),
        Column(title="positive", digits=2, help="Share of slices whose curvature is above 0."),
    )
    rows = tuple(
        (label, float(layer.layer), float(layer.count), *layer.quantiles, layer.magnitude, layer.positive)
        for label, one in measured.items()
        for layer in one.layers
    )
    return Table(title="Relative slice curvature", columns=columns, rows=rows)
