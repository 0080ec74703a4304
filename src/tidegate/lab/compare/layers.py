"""What was measured on the trained model of each variant's first run: curvature of layers, gauge of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidegate.experts.gauge import FREE_BELOW
from tidegate.lab.compare.summary import Summary
from tidegate.lab.models.curvature_panels import curvature_panels
from tidegate.lab.training.measurements import LayerGauge
from tidegate.report.page import CellValue, Column, Prose, Section, Table


def layer_sections(summary: Summary) -> Iterator[Section]:
    """Show the measurements, and why something was not measured."""
    layers = {variant.name: variant.layers for variant in summary.variants}
    yield Section(
        title="How the layers bend",
        lead="Relative curvature of two-dimensional slices through each attention layer, of the first run of each "
        "variant: 0 is flat, 1 a sphere about the origin, below 0 a saddle.",
        panels=(
            *curvature_panels({name: own.curvature for name, own in layers.items() if own.curvature is not None}),
            *_reasons({name: own.curvature_reason for name, own in layers.items()}),
        ),
    )
    gauges = {name: own.gauge for name, own in layers.items() if own.gauge}
    yield Section(
        title="How free the heads are",
        lead="Mixtures of a head's channels that change no output, of the first run of each variant. Where all are "
        "free the channels mean nothing one by one; a gate between value and output projection gives each its place.",
        panels=(
            *((_gauge_table(gauges),) if gauges else ()),
            *_reasons({name: own.gauge_reason for name, own in layers.items()}),
        ),
    )


def _reasons(reasons: Mapping[str, str]) -> Iterator[Prose]:
    """Say why something was not measured, a paragraph for each reason; it is empty where there is a measurement."""
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
        Column(title="directions of a head", digits=0, help="Ways to mix its channels: their number squared."),
        Column(title="free, theory", digits=0),
        Column(title="free, least", digits=0, help="Over the heads of the layer."),
        Column(title="free, most", digits=0),
        Column(
            title="hold of the others",
            help="Median over directions and heads: change of the output along them, over that of the output "
            "projection where it tells most.",
        ),
        Column(title="weakest hold", help="Smallest singular value among the directions that are not free."),
    )
    rows = tuple(
        (name, float(place), *_layer_cells(layer))
        for name, layers in models.items()
        for place, layer in enumerate(layers)
    )
    return Table(title="How free are the channels of each head to mix?", columns=columns, rows=rows)


def _layer_cells(layer: LayerGauge) -> Iterator[CellValue]:
    values = np.asarray(layer.singular_values)
    held = values[values > FREE_BELOW]
    yield float(values.shape[1])
    yield None if layer.predicted is None else float(layer.predicted)
    yield from (float(min(layer.free)), float(max(layer.free)))
    yield None if not held.size else f"{float(np.median(held)):.1e}"
    yield None if not held.size else f"{float(held.min()):.1e}"
