"""The drawing that several plots share: figures without pyplot, heat maps, labels, colours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tidegate.tensors._checks import require_floating
from tidegate.tensors.namespace import accumulate, is_floating, unify
from tidegate.tensors.softmax import attention_entropy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.tensors.namespace import Array

MASKED = "#D9D9D9"
MAX_LABELS = 32
MAX_NUMBERS = 8


def new_figure(figsize: tuple[float, float] | None) -> Any:
    return Figure(figsize=figsize, layout="constrained")


def to_numpy(name: str, array: Array) -> Any:
    """The array as NumPy's, without its gradient, half precision widened."""
    _, array = unify(**{name: array})
    array = accumulate(array) if is_floating(array) else array
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def require_matrix(**arrays: Array) -> Any:
    """The one array named, as a NumPy matrix of floats."""
    ((name, array),) = arrays.items()
    matrix = to_numpy(name, array)
    require_floating(**{name: matrix})
    if matrix.ndim != 2:
        raise ValueError(f"{name} must have two axes to be drawn; got {matrix.shape}. Pick one, as in {name}[0].")
    return matrix


def heat_map(axes: Any, weights: Any, cmap: str, largest: float) -> Any:
    shown = np.ma.masked_equal(weights, 0)
    image = axes.imshow(shown, cmap=cmap, vmin=0, vmax=largest or 1.0, aspect="auto", interpolation="nearest")
    image.set_cmap(image.get_cmap().with_extremes(bad=MASKED))
    integer_ticks(axes)
    return image


def heat_maps(names: Sequence[str], weights: Sequence[Any], title: str, figsize: tuple[float, float] | None) -> Any:
    """Up to four heat maps a row, on one colour scale."""
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    figure = new_figure(figsize or (3.2 * columns + 1, 3.3 * rows + 0.4))
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(names))]
    largest = float(max(matrix.max(initial=0) for matrix in weights))
    image: Any = None
    for place, (axes, name, matrix) in enumerate(zip(panels, names, weights, strict=True)):
        image = heat_map(axes, matrix, "Blues", largest)
        spread = float(attention_entropy(matrix).mean())
        axes.set_title(f"{name}\nmean entropy {spread:.2f} nats", fontsize="medium")
        axes.set_xlabel("key" if place + columns >= len(names) else "")
        axes.set_ylabel("query" if place % columns == 0 else "")
    figure.suptitle(title)
    figure.colorbar(image, ax=panels, label=weight_label(*weights))
    return figure


def weight_label(*weights: Any) -> str:
    return "weight (grey: exactly 0)" if any((matrix == 0).any() for matrix in weights) else "weight"


def integer_ticks(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def name_ticks(axis: Any, labels: Sequence[str] | None, size: int, name: str) -> None:
    """Name the ticks: all of them, or evenly spaced ones where there are too many to read."""
    if labels is None:
        return
    if len(labels) != size:
        raise ValueError(f"{name} must have one label for each of the {size} positions of A; got {len(labels)}.")
    places = range(0, size, math.ceil(size / MAX_LABELS))
    named = [str(labels[place]) for place in places]
    crowded = axis.axis_name == "x" and sum(map(len, named)) > 40
    axis.set_ticks(places, named, rotation=90 if crowded else 0)


def write_numbers(axes: Any, weights: Any) -> None:
    for (query, key), weight in np.ndenumerate(weights):
        colour = "white" if weight > 0.65 * weights.max() else "black"
        axes.text(
            key, query, f"{weight:.2f}" if weight else "0", ha="center", va="center", color=colour, fontsize="small"
        )


def draw_grid(axes: Any, shape: tuple[int, int]) -> None:
    """Thin lines between the cells."""
    axes.set_xticks(np.arange(1, shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
