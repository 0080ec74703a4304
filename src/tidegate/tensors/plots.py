"""Views of attention, masks, temperature, gradients and Hopfield energies, each a matplotlib figure.

Arrays of any library are taken, with or without gradient. The figures are not registered with pyplot: nothing is left
open, and nobody has to close them. Colours are safe for colour-blind readers; entropies are in nats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tidegate.tensors._checks import (
    require_count,
    require_equal,
    require_floating,
    require_mask,
    require_rank,
)
from tidegate.tensors._drawing import (
    MASKED,
    MAX_LABELS,
    MAX_NUMBERS,
    draw_grid,
    heat_map,
    heat_maps,
    integer_ticks,
    name_ticks,
    new_figure,
    require_matrix,
    to_numpy,
    weight_label,
    write_numbers,
)
from tidegate.tensors.attention import attention_scores_with_metric, attention_weights
from tidegate.tensors.hopfield import classical_capacity, energy_landscape_1d, modern_hopfield_energy
from tidegate.tensors.palette import BLUE, LINES, SKY, VERMILION
from tidegate.tensors.softmax import attention_entropy, entropy, max_entropy, temperature_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.tensors.namespace import Array

__all__ = [
    "compare_metrics",
    "plot_attention_weights",
    "plot_entropy_distribution",
    "plot_gradient_flow",
    "plot_hopfield_energy",
    "plot_mask",
    "plot_multihead_attention",
    "plot_retrieval_success",
    "plot_temperature_sweep",
]


def plot_attention_weights(
    A: Array,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    title: str = "Attention Weights",
    cmap: str = "Blues",
    figsize: tuple[float, float] = (8, 6),
    ax: Any = None,
) -> Any:
    """Heat map of one head's weights; cells of weight exactly 0 are grey, and up to 8 × 8 cells carry their number.

    A       : (query, key)
    ax      : axes to draw on, in place of a new figure
    returns : the figure
    """
    weights = require_matrix(A=A)
    axes: Any = ax if ax is not None else new_figure(figsize).subplots()
    image = heat_map(axes, weights, cmap, float(weights.max(initial=0)))
    name_ticks(axes.yaxis, query_labels, weights.shape[0], "query_labels")
    name_ticks(axes.xaxis, key_labels, weights.shape[1], "key_labels")
    axes.set(title=title, xlabel="key", ylabel="query")
    axes.figure.colorbar(image, ax=axes, label=weight_label(weights))
    if max(weights.shape) <= MAX_NUMBERS:
        write_numbers(axes, weights)
    return axes.figure


def plot_multihead_attention(
    A: Array, head_names: Sequence[str] | None = None, figsize: tuple[float, float] | None = None
) -> Any:
    """Heat maps of all heads on one colour scale, each with its mean entropy.

    A       : (head, query, key)
    returns : the figure
    """
    weights = to_numpy("A", A)
    require_floating(A=weights)
    require_rank("head, query, key", exact=True, A=weights)
    require_count(1, **{"the number of heads in A": weights.shape[0]})
    names = [f"head {head}" for head in range(len(weights))] if head_names is None else list(head_names)
    require_equal("number of heads", A=len(weights), head_names=len(names))
    return heat_maps(names, list(weights), "Attention weights by head", figsize)


def plot_entropy_distribution(
    A: Array, title: str = "Attention Entropy Distribution", figsize: tuple[float, float] = (8, 5)
) -> Any:
    """Histogram of the entropies of all queries that see anything, with their mean and the largest possible, log(keys).

    A       : (..., query, key)
    returns : the figure
    """
    weights = to_numpy("A", A)
    require_floating(A=weights)
    require_rank("query, key", A=weights)
    entropies = attention_entropy(weights)[weights.sum(axis=-1) > 0]
    if entropies.size == 0:
        raise ValueError(f"A must have a query with a weight above 0; got none in shape {weights.shape}.")
    largest = max_entropy(weights.shape[-1])
    figure = new_figure(figsize)
    axes: Any = figure.subplots()
    axes.hist(entropies, bins=30, range=(0, max(largest, float(entropies.max()), 1e-3)), color=SKY, edgecolor="white")
    axes.axvline(entropies.mean(), color=BLUE, label=f"mean {entropies.mean():.2f}")
    axes.axvline(
        largest, color=VERMILION, linestyle="--", label=f"largest possible, log {weights.shape[-1]} = {largest:.2f}"
    )
    axes.set(title=title, xlabel="entropy (nats)", ylabel="number of queries")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def plot_temperature_sweep(
    scores: Array, temperatures: Array | None = None, figsize: tuple[float, float] = (10, 4)
) -> Any:
    """One row of scores as the temperature rises: left the weight of every key, right the entropy.

    scores       : (key,)
    temperatures : (temperature,), above 0, in any order; None is 60 of them from 0.1 to 10
    returns      : the figure
    """
    row = to_numpy("scores", scores)
    require_floating(scores=row)
    require_rank("key", exact=True, scores=row)
    given = np.geomspace(0.1, 10, 60) if temperatures is None else to_numpy("temperatures", temperatures)
    rising = np.sort(given, axis=-1)
    weights = temperature_sweep(row, rising)
    figure = new_figure(figsize)
    left, right = figure.subplots(1, 2)
    key_edges = np.arange(len(row) + 1) - 0.5
    image = left.pcolormesh(_edges(rising), key_edges, weights.T, cmap="Blues", vmin=0, vmax=1)
    left.set(title="Cold sharpens the weights, heat levels them", xscale="log", xlabel="temperature", ylabel="key")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=left, label="weight")
    right.plot(rising, entropy(weights), color=BLUE, marker="o" if len(rising) < 20 else None, label="entropy")
    _mark_largest_entropy(right, len(row))
    right.set(title="Entropy rises with temperature", xscale="log", xlabel="temperature", ylabel="entropy (nats)")
    return figure


def plot_gradient_flow(flow_data: Mapping[str, Any], figsize: tuple[float, float] = (12, 4)) -> Any:
    """What `gradient_flow_analysis` returns: the loss's gradient in the weights, in the scores, and all norms.

    flow_data : has dL_dA and dL_dS, both (query, key), and grad_norms, from name to norm
    returns   : the figure
    """
    missing = [name for name in ("dL_dA", "dL_dS", "grad_norms") if name not in flow_data]
    if missing:
        raise ValueError(
            f"flow_data must have dL_dA, dL_dS and grad_norms; it lacks {', '.join(missing)}. "
            "Pass what gradient_flow_analysis returns."
        )
    figure = new_figure(figsize)
    panels = figure.subplots(1, 3)
    titles = {"dL_dA": "Gradient in the weights, dL/dA", "dL_dS": "In the scores, dL/dS: rows sum to 0"}
    for axes, (name, title) in zip(panels, titles.items(), strict=False):
        gradient = require_matrix(**{name: flow_data[name]})
        reach = float(np.abs(gradient).max(initial=0)) or 1.0
        image = axes.imshow(gradient, cmap="PuOr", vmin=-reach, vmax=reach, aspect="auto")
        integer_ticks(axes)
        axes.set(title=title, xlabel="key", ylabel="query")
        figure.colorbar(image, ax=axes, label=name.replace("_", "/"))
    norms = {name: float(to_numpy(name, norm)) for name, norm in flow_data["grad_norms"].items()}
    panels[2].barh(list(norms), list(norms.values()), color=BLUE)
    panels[2].bar_label(panels[2].containers[0], fmt="%.2g", padding=3)
    panels[2].margins(x=0.18)
    panels[2].invert_yaxis()
    panels[2].set(title="Size of each gradient", xlabel="Frobenius norm")
    return figure


def plot_mask(mask: Array, title: str = "Attention Mask", figsize: tuple[float, float] = (6, 6)) -> Any:
    """Which query may attend to which key; the legend counts the pairs.

    mask    : (query, key) bool, True where a query may attend
    returns : the figure
    """
    allowed = to_numpy("mask", mask)
    require_mask(allowed, allowed.shape)
    require_rank("query, key", exact=True, mask=allowed)
    figure = new_figure(figsize)
    axes: Any = figure.subplots()
    axes.imshow(allowed, cmap=ListedColormap([MASKED, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    if max(allowed.shape) <= MAX_LABELS:
        draw_grid(axes, allowed.shape)
    integer_ticks(axes)
    axes.set(title=title, xlabel="key", ylabel="query")
    count = int(allowed.sum())
    names = {BLUE: f"may attend ({count} of {allowed.size})", MASKED: f"masked ({allowed.size - count})"}
    patches = [Patch(facecolor=colour, label=name) for colour, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    return figure


def plot_hopfield_energy(
    patterns: Array,
    state_trajectory: Array | None = None,
    figsize: tuple[float, float] = (10, 4),
    *,
    beta: float = 1.0,
) -> Any:
    """Modern Hopfield energy: left on a plane with patterns and trajectory, right along the trajectory.

    The plane of patterns of width 2 is their own; wider ones are cut by the plane through their mean along their first
    two principal directions, onto which patterns and trajectory are projected. Without a trajectory the right panel is
    `energy_landscape_1d` of coordinate 0.

    patterns         : (num_patterns, d), d at least 2
    state_trajectory : (step, d), such as `hopfield_retrieve(...).trajectory`
    returns          : the figure
    """
    points = require_matrix(patterns=patterns)
    require_count(2, **{"the width of patterns": points.shape[1]})
    path = None if state_trajectory is None else require_matrix(state_trajectory=state_trajectory)
    if path is not None:
        require_equal("width", patterns=points.shape[1], state_trajectory=path.shape[1])
    figure = new_figure(figsize)
    left, right = figure.subplots(1, 2)
    _draw_energy_plane(left, points, path, beta)
    if path is None:
        right.plot(*energy_landscape_1d(points, beta=beta), color=BLUE)
        right.set(title="Energy through the mean, along coordinate 0", xlabel="coordinate 0", ylabel="energy")
    else:
        right.plot(modern_hopfield_energy(path, points, beta), color=BLUE, marker="o")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.set(title="Energy along the trajectory", xlabel="step", ylabel="energy")
    return figure


def compare_metrics(
    Q: Array, K: Array, metrics: Mapping[str, Array], figsize: tuple[float, float] | None = None
) -> Any:
    """Heat maps of the attention weights that each metric gives to the same queries and keys.

    Q       : (query, width)
    K       : (key, width)
    metrics : from name to metric (width, width), which holds the scale
    returns : the figure
    """
    queries, keys = require_matrix(Q=Q), require_matrix(K=K)
    if not metrics:
        raise ValueError("metrics must name at least one metric; got an empty mapping.")
    weights = [
        attention_weights(attention_scores_with_metric(queries, keys, require_matrix(**{name: metric})))
        for name, metric in metrics.items()
    ]
    return heat_maps(list(metrics), weights, "Attention weights under each metric", figsize)


def plot_retrieval_success(
    num_patterns: Sequence[int],
    success: Mapping[int, Any],
    title: str = "Retrieval Success against Stored Patterns",
    figsize: tuple[float, float] = (8, 5),
) -> Any:
    """Measured retrieval success against the number of stored patterns, a curve for each width.

    A dotted line in a curve's colour marks what a classical network of that width could store, if two patterns or more.

    num_patterns : the numbers of stored patterns, rising, each at least 1
    success      : from width d to the share retrieved at each of num_patterns, such as `retrieval_success` measures
    returns      : the figure
    """
    require_count(1, **{f"num_patterns[{place}]": count for place, count in enumerate(num_patterns)})
    if not success:
        raise ValueError("success must have the curve of at least one width; got an empty mapping.")
    figure = new_figure(figsize)
    axes: Any = figure.subplots()
    for index, (width, shares) in enumerate(success.items()):
        curve = [float(share) for share in shares]
        require_equal("number of entries", num_patterns=len(num_patterns), **{f"success[{width}]": len(curve)})
        colour = LINES[index % len(LINES)]
        axes.plot(num_patterns, curve, color=colour, marker="o", markersize=4, label=f"d = {width}")
        if classical_capacity(width) >= 2:
            axes.axvline(classical_capacity(width), color=colour, linestyle=":", linewidth=1.2)
    axes.plot([], [], color="0.4", linestyle=":", label="classical capacity, 0.138 d")
    axes.set(title=title, xscale="log", xlabel="stored patterns", ylabel="share retrieved", ylim=(-0.04, 1.04))
    figure.legend(loc="outside right upper")
    return figure


def _mark_largest_entropy(axes: Any, num_keys: int) -> None:
    label = f"largest possible, log {num_keys}"
    axes.axhline(max_entropy(num_keys), color=VERMILION, linestyle="--", label=label)
    axes.legend()


def _edges(rising: Any) -> Any:
    """Borders of cells around rising positive numbers, halfway in the logarithm."""
    logs = np.log(rising)
    between = (logs[1:] + logs[:-1]) / 2
    first, last = (
        (2 * logs[0] - between[0], 2 * logs[-1] - between[-1]) if len(logs) > 1 else (logs[0] - 1, logs[0] + 1)
    )
    return np.exp(np.concatenate([[first], between, [last]]))


def _draw_energy_plane(axes: Any, patterns: Any, path: Any, beta: float) -> None:
    """Contours of the energy on the plane that `plot_hopfield_energy` describes."""
    origin, directions, title, names = _plane(patterns)
    on_plane = (patterns - origin) @ directions.T
    trail = None if path is None else (path - origin) @ directions.T
    across, up = _limits_around(on_plane if trail is None else np.concatenate([on_plane, trail]))
    states = origin + across[None, :, None] * directions[0] + up[:, None, None] * directions[1]
    contours = axes.contourf(across, up, modern_hopfield_energy(states, patterns, beta), levels=20, cmap="cividis")
    axes.figure.colorbar(contours, ax=axes, label="energy")
    axes.scatter(*on_plane.T, marker="*", s=140, color="white", edgecolor="black", label="pattern", zorder=3)
    if trail is not None:
        axes.plot(*trail.T, color=VERMILION, marker="o", markersize=4, label="trajectory")
        axes.scatter(*trail[0], color="white", edgecolor=VERMILION, s=60, label="start", zorder=4)
    axes.set(title=title, xlabel=names[0], ylabel=names[1])
    axes.legend(loc="best", fontsize="small")


def _plane(patterns: Any) -> tuple[Any, Any, str, tuple[str, str]]:
    """A point and two orthonormal directions of the plane to draw, its title and its axes' names."""
    if patterns.shape[1] == 2:
        return np.zeros(2), np.eye(2), "Energy and patterns", ("coordinate 0", "coordinate 1")
    mean = patterns.mean(axis=0)
    names = ("first principal direction", "second principal direction")
    return mean, np.linalg.svd(patterns - mean)[2][:2], "Energy on the patterns' principal plane", names


def _limits_around(points: Any) -> list[Any]:
    """120 values of each coordinate that span the points (point, 2) with room around them."""
    margin = 0.25 * max(float(np.ptp(points, axis=0).max()), 1e-3)
    return [np.linspace(float(line.min()) - margin, float(line.max()) + margin, 120) for line in points.T]
