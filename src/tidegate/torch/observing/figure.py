"""Draw an observation with matplotlib: maps by layer and head, curves by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tidegate._validation import InputError
from tidegate.torch.observing.observation import statistic_names

if TYPE_CHECKING:
    from tidegate.torch.observing.observation import Observation

_MAPS_IN_A_ROW = 3
_CURVES = ("mass", "entropy")
_MAPS = ("mass", "sink", "contribution", "entropy")
_LAYERS_IN_LEGEND = 8


def observation_figure(observation: Observation) -> Figure:
    """Return a figure with maps of mass, sink, contribution, entropy and mean gates, and curves by position.

    Curves are means over the heads of a layer, dark for the first layer and light for the last. The figure is not
    registered with pyplot, so it need not be closed.

    Raises:
        InputError: The observation has no layers.
    """
    if not observation.layers:
        raise InputError("observation", expected="one with at least one layer")
    maps = _maps(observation)
    map_rows = math.ceil(len(maps) / _MAPS_IN_A_ROW)
    map_height = 1.1 + 0.28 * min(max(len(observation.layers), 4), 24)
    figure = Figure(figsize=(10, map_height * map_rows + 3.2), layout="constrained")
    upper, lower = cast("Any", figure.subfigures(2, 1, height_ratios=[map_height * map_rows, 3.2]))
    upper.suptitle(f"Attention by layer and head; the key set is {observation.keys}", fontsize=10)
    for place, (title, rows) in enumerate(maps):
        _draw_map(upper.add_subplot(map_rows, _MAPS_IN_A_ROW, place + 1), title, rows)
    for axes, statistic in zip(lower.subplots(1, len(_CURVES)), _CURVES, strict=True):
        _draw_curves(axes, observation, statistic)
    return figure


def _maps(observation: Observation) -> list[tuple[str, list[Sequence[float]]]]:
    """Return the title and the rows of each map."""
    names = statistic_names(observation.keys)
    maps: list[tuple[str, list[Sequence[float]]]] = [
        (names[name], [layer.head_means(name) for layer in observation.layers])
        for name in _MAPS
        if any(name in layer.heads for layer in observation.layers)
    ]
    for site in dict.fromkeys(site for layer in observation.layers for site in layer.gates):
        means = (layer.gates[site].mean if site in layer.gates else () for layer in observation.layers)
        maps.append((f"mean gate, {site}", list(means)))
    return maps


def _draw_map(axes: Any, title: str, rows: Sequence[Sequence[float]]) -> None:
    width = max(map(len, rows))
    cells = [[*row, *[math.nan] * (width - len(row))] for row in rows]
    image = axes.imshow(cells, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)


def _draw_curves(axes: Any, observation: Observation, statistic: str) -> None:
    count = len(observation.layers)
    for place, layer in enumerate(observation.layers):
        means = [fmean(values) for values in zip(*layer.by_position[statistic], strict=True)]
        # The lightest colors are too pale for a line.
        color = colormaps["viridis"](0.8 * place / max(count - 1, 1))
        axes.plot(layer.positions, means, color=color, linewidth=1.2, label=f"layer {place}")
    axes.set_title(f"{statistic_names(observation.keys)[statistic]}, by position", fontsize=9, loc="left")
    axes.set_xlabel("position of the query", fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if count <= _LAYERS_IN_LEGEND:
        axes.legend(fontsize=7, frameon=False)
