"""Measurements of the trained model of each variant's first run: curvature of layers, free directions of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidegate.experts.gauge import FREE_BELOW
from tidegate.lab.compare.summary import Summary
from tidegate.lab.models.curvature_panels import curvature_panels
from tidegate.lab.training.measurements import LayerGauge
from tidegate.report.page import CellValue, Column, Prose, Section, Table


def layer_sections(summary: Summary) -> Iterator[Section]:
    """Return the sections of the measurements, with the reasons for missing ones."""
    layers = {variant.name: variant.layers for variant in summary.variants}
    yield Section(
        title="Curvature of the layers",
        lead="Relative curvature of two-dimensional slices through each attention layer, in the first run of each "
        "variant: 0 is flat, 1 is a sphere about the origin, negative values are saddles.",
        panels=(
            *curvature_panels({name: own.curvature for name, own in layers.items() if own.curvature is not None}),
            *_reasons({name: own.curvature_reason for name, own in layers.items()}),
        ),
    )
    gauges = {name: own.gauge for name, own in layers.items() if own.gauge}
    yield Section(
        title="Free directions of the heads",
        lead="Number of ways to re-mix a head's value channels, and undo it in the output projection, without changing "
        "the output; in the first run of each variant. If all are free, individual channels have no meaning; an "
        "elementwise gate between the value and output projections prevents this.",
        panels=(
            *((_gauge_table(gauges),) if gauges else ()),
            *_reasons({name: own.gauge_reason for name, own in layers.items()}),
        ),
    )


def _reasons(reasons: Mapping[str, str]) -> Iterator[Prose]:
    """Return a paragraph for each reason that something was not measured; a reason is empty if it was."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason:
            names.setdefault(reason, []).append(name)
    if names:
        yield Prose(paragraphs=tuple(f"Not measured for {', '.join(own)}: {reason}." for reason, own in names.items()))


def _gauge_table(models: Mapping[str, Sequence[LayerGauge]]) -> Table:
    columns = (
        Column(title="model"),
        Column(title="layer", digits=0),
        Column(title="directions per head", digits=0, help="Ways to mix its channels: their number squared."),
        Column(title="free, theory", digits=0),
        Column(title="free, minimum", digits=0, help="Over the heads of the layer."),
        Column(title="free, maximum", digits=0),
        Column(
            title="sensitivity of the others",
            help="Median singular value over heads and directions that are not free: change of the output relative to "
            "the largest change by the output projection.",
        ),
        Column(title="least sensitivity", help="Smallest singular value among the directions that are not free."),
    )
    rows = tuple(
        (name, float(place), *_layer_cells(layer))
        for name, layers in models.items()
        for place, layer in enumerate(layers)
    )
    return Table(title="Ways to re-mix the value channels of each head", columns=columns, rows=rows)


def _layer_cells(layer: LayerGauge) -> Iterator[CellValue]:
    values = np.asarray(layer.singular_values)
    held = values[values > FREE_BELOW]
    yield float(values.shape[1])
    yield None if layer.predicted is None else float(layer.predicted)
    yield from (float(min(layer.free)), float(max(layer.free)))
    yield None if not held.size else f"{float(np.median(held)):.1e}"
    yield None if not held.size else f"{float(held.min()):.1e}"
