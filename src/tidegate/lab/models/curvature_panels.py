"""Show slice curvature by layer, of one or several models: curves and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

from tidegate.lab.training.measurements import LayerCurvature, ModelCurvature
from tidegate.report.page import Column, Lines, Page, Panel, Prose, Section, Series, Snippet, Table, View, Views


def curvature_panels(measured: Mapping[str, ModelCurvature]) -> tuple[Panel, ...]:
    """Return curves over layers and a table, for models by label; an empty tuple without models."""
    if not measured:
        return ()
    medians = (
        f"{label}: {', '.join(f'{layer.quantiles[2]:.3g}' for layer in one.layers)}" for label, one in measured.items()
    )
    quantiles = Lines(
        title="Median curvature of slices, with quartiles",
        alternative=f"Medians by layer. {'; '.join(medians)}.",
        x_label="layer",
        y_label="relative curvature",
        series=_series(measured, lambda layer: layer.quantiles[2], quartiles=True),
        zero_line=True,
    )
    magnitudes = Lines(
        title="Magnitude of slice curvature",
        alternative="One line per model over layers: the median of the absolute relative curvature.",
        x_label="layer",
        y_label="median |K|, relative",
        series=_series(measured, lambda layer: layer.magnitude),
        log_y=all(layer.magnitude > 0 for one in measured.values() for layer in one.layers),
    )
    shares = Lines(
        title="Share of slices with positive curvature",
        alternative="One line per model over layers: the share of slices with positive curvature.",
        x_label="layer",
        y_label="share",
        series=_series(measured, lambda layer: layer.positive),
    )
    views = (
        View(label="curvature", panel=quantiles),
        View(label="magnitude", panel=magnitudes),
        View(label="positive share", panel=shares),
    )
    return Views(title="Slice curvature by layer", views=views), _table(measured)


def curvature_page(measured: ModelCurvature, *, command: str) -> Page:
    """Return the page of one model."""
    sampling = measured.sampling
    what = "attention layers" if sampling.part == "attention" else "blocks"
    return Page(
        title=f"Curvature of {measured.model}",
        summary=f"Slice curvature of the {len(measured.layers)} {what} of {measured.model}, on "
        f"{measured.num_sequences} sequences of {measured.length} tokens: {measured.layers[0].count} random planes per "
        "layer.",
        sections=(
            Section(title="By layer", panels=curvature_panels({measured.model: measured})),
            Section(title="How to read it", panels=(Prose(paragraphs=_READING),)),
            Section(title="Reproduce", panels=(Snippet(title="Command", text=command),)),
        ),
        data=asdict(measured),
    )


_READING = (
    "A layer is treated as a map from the input at one position, with all others fixed, to the outputs at that and all "
    "later positions. A slice is the image of a plane of two random input directions; its curvature contains less "
    "information than the curvature of the whole manifold.",
    "Curvature is relative: K times the mean squared norm of an output. A sphere around the origin through the output "
    "has 1; a plane, a cylinder and a cone have 0; a saddle has a negative value.",
)


def _series(
    measured: Mapping[str, ModelCurvature], value: Callable[[LayerCurvature], float], *, quartiles: bool = False
) -> tuple[Series, ...]:
    """Return one series per model, over its layers."""
    return tuple(
        Series(
            label=label,
            group=label,
            x=tuple(float(layer.layer) for layer in one.layers),
            y=tuple(map(value, one.layers)),
            low=tuple(layer.quantiles[1] for layer in one.layers) if quartiles else None,
            high=tuple(layer.quantiles[3] for layer in one.layers) if quartiles else None,
        )
        for label, one in measured.items()
    )


def _table(measured: Mapping[str, ModelCurvature]) -> Table:
    curved = [layer.magnitude for one in measured.values() for layer in one.layers if layer.magnitude > 0]
    # Three digits of the smallest nonzero curvature.
    digits = min(max(2 - math.floor(math.log10(min(curved))), 3), 9) if curved else 3
    columns = (
        Column(title="model"),
        Column(title="layer"),
        Column(title="planes"),
        *(Column(title=name, digits=digits, signed=True) for name in ("5 %", "25 %", "median", "75 %", "95 %")),
        Column(title="median |K|", digits=digits),
        Column(title="positive", digits=2, help="Share of slices with positive curvature."),
    )
    rows = tuple(
        (label, float(layer.layer), float(layer.count), *layer.quantiles, layer.magnitude, layer.positive)
        for label, one in measured.items()
        for layer in one.layers
    )
    return Table(title="Relative slice curvature", columns=columns, rows=rows)
