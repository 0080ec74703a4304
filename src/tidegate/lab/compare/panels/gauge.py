"""Free directions of trained models as panels: how many of each head, and how firmly the others are held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidegate.experts.gauge import FREE_BELOW
from tidegate.lab.training.measurements import LayerGauge
from tidegate.report.page import CellValue, Column, Lines, Map, Maps, Panel, Series, Table


def gauge_panels(models: Mapping[str, Sequence[LayerGauge]]) -> tuple[Panel, ...]:
    """A table, a map of each model by layer and head, and the fall of the singular values.

    models : by the name to show, the layers of each
    """
    measured = {name: layers for name, layers in models.items() if layers}
    return (_table(measured), _map(measured), _fall(measured)) if measured else ()


def _table(models: Mapping[str, Sequence[LayerGauge]]) -> Table:
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
    rows = [
        (name, float(place), *_layer_cells(layer))
        for name, layers in models.items()
        for place, layer in enumerate(layers)
    ]
    return Table(title="How free are the channels of each head to mix?", columns=columns, rows=tuple(rows))


def _layer_cells(layer: LayerGauge) -> Iterator[CellValue]:
    values = np.asarray(layer.singular_values)
    held = values[values > FREE_BELOW]
    yield float(values.shape[1])
    yield None if layer.predicted is None else float(layer.predicted)
    yield from (float(min(layer.free)), float(max(layer.free)))
    yield None if not held.size else f"{float(np.median(held)):.1e}"
    yield None if not held.size else f"{float(held.min()):.1e}"


def _map(models: Mapping[str, Sequence[LayerGauge]]) -> Maps:
    shares = {
        name: tuple(tuple(free / len(layer.singular_values[0]) for free in layer.free) for layer in layers)
        for name, layers in models.items()
    }
    words = "; ".join(f"{name} {min(map(min, rows)):.2f} to {max(map(max, rows)):.2f}" for name, rows in shares.items())
    return Maps(
        title=f"Share of the channels' mixtures that no output shows: {words}",
        alternative=f"Share of free directions by layer and key/value head: {words}.",
        row_label="layer",
        column_label="key/value head",
        value_label="share of free directions",
        maps=tuple(Map(label=name, values=rows) for name, rows in shares.items()),
        low=0.0,
        high=1.0,
    )


def _fall(models: Mapping[str, Sequence[LayerGauge]]) -> Lines:
    series = tuple(_falls(models))
    words = "; ".join(
        f"{line.label} {line.y[0]:.1e}, {sum(value is not None for value in line.y)} of {len(line.y)} seen"
        for line in series
        if line.y[0] is not None
    )
    return Lines(
        title="Singular values of each mixture of channels, in falling order",
        alternative=f"Singular values along the gauge orbit, medians over heads. First values: {words or 'all free'}.",
        x_label="direction, in falling order",
        y_label="change of the output, relative",
        series=series,
        log_y=True,
    )


def _falls(models: Mapping[str, Sequence[LayerGauge]]) -> Iterator[Series]:
    """One line a layer, of what is held: free directions have no place on a logarithmic axis."""
    for name, layers in models.items():
        for place, layer in enumerate(layers):
            middle: list[float] = np.median(layer.singular_values, axis=0).tolist()
            if max(middle) <= FREE_BELOW:
                continue
            yield Series(
                label=f"{name}, layer {place}",
                group=name,
                x=tuple(float(number) for number in range(1, len(middle) + 1)),
                y=tuple(value if value > FREE_BELOW else None for value in middle),
            )
