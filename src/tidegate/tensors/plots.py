"""Figures of attention, masks, temperature, gradients and Hopfield energies, by matplotlib.

Arrays may come from any library, with or without gradient. The figures are not registered with pyplot and need not be
closed. Entropies are in nats, `figsize` in inches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tidegate._validation import InputError
from tidegate.tensors._checks import check_arrays, require_count, require_mask, require_rank
from tidegate.tensors.attention import attention_scores_with_metric, attention_weights
from tidegate.tensors.hopfield import classical_capacity, energy_landscape_1d, modern_hopfield_energy
from tidegate.tensors.namespace import Array, accumulate, is_floating, unify
from tidegate.tensors.palette import BLUE, LINES, SKY, VERMILION
from tidegate.tensors.softmax import attention_entropy, entropy, max_entropy, temperature_sweep

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


MASKED = "#D9D9D9"
MAX_LABELS = 32
MAX_NUMBERS = 8


def plot_attention_weights(
    A: Array,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    title: str = "Attention Weights",
    cmap: str = "Blues",
    figsize: tuple[float, float] = (8, 6),
    ax: Any = None,
) -> Any:
    """Draw a heat map of one head's weights A (query, key), on `ax` or on a new figure.

    Zeros are gray, and up to 8 × 8 cells show their number.
    """
    weights = _floats("query, key", A=A)
    axes: Any = ax if ax is not None else _new_figure(figsize).subplots()
    image = _heat_map(axes, weights, cmap, float(weights.max(initial=0)))
    _name_ticks(axes.yaxis, query_labels, weights.shape[0], "query_labels")
    _name_ticks(axes.xaxis, key_labels, weights.shape[1], "key_labels")
    axes.set(title=title, xlabel="key", ylabel="query")
    axes.figure.colorbar(image, ax=axes, label=_weight_label(weights))
    if max(weights.shape) <= MAX_NUMBERS:
        for (query, key), weight in np.ndenumerate(weights):
            color = "white" if weight > 0.65 * weights.max() else "black"
            text = f"{weight:.2f}" if weight else "0"
            axes.text(key, query, text, ha="center", va="center", color=color, fontsize="small")
    return axes.figure


def plot_multihead_attention(
    A: Array, head_names: Sequence[str] | None = None, figsize: tuple[float, float] | None = None
) -> Any:
    """Draw heat maps of all heads A (head, query, key) on one color scale, each with its mean entropy."""
    weights = _floats("head, query, key", A=A)
    if not len(weights):
        raise InputError("A", expected="at least one head", got=weights.shape)
    names = [f"head {head}" for head in range(len(weights))] if head_names is None else list(head_names)
    _require_length("head_names", names, len(weights))
    return _heat_maps(names, list(weights), "Attention weights by head", figsize)


def plot_entropy_distribution(
    A: Array, title: str = "Attention Entropy Distribution", figsize: tuple[float, float] = (8, 5)
) -> Any:
    """Draw a histogram of the entropies of all queries of A (..., query, key), without fully masked ones.

    Lines mark their mean and the largest possible entropy, log(keys).
    """
    weights = _floats("..., query, key", A=A)
    entropies = attention_entropy(weights)[weights.sum(axis=-1) > 0]
    if entropies.size == 0:
        raise InputError("A", expected="above 0 for at least one query", got=weights.shape)
    largest = max_entropy(weights.shape[-1])
    figure = _new_figure(figsize)
    axes: Any = figure.subplots()
    axes.hist(entropies, bins=30, range=(0, max(largest, float(entropies.max()), 1e-3)), color=SKY, edgecolor="white")
    axes.axvline(entropies.mean(), color=BLUE, label=f"mean {entropies.mean():.2f}")
    label = f"maximum, log {weights.shape[-1]} = {largest:.2f}"
    axes.axvline(largest, color=VERMILION, linestyle="--", label=label)
    axes.set(title=title, xlabel="entropy (nats)", ylabel="number of queries")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def plot_temperature_sweep(
    scores: Array, temperatures: Array | None = None, figsize: tuple[float, float] = (10, 4)
) -> Any:
    """Draw the weights of one row of scores (key,), and their entropy, against temperature.

    `temperatures` (temperature,) are above 0, in any order; None is 60 of them from 0.1 to 10.
    """
    row = _floats("key", scores=scores)
    given = np.geomspace(0.1, 10, 60) if temperatures is None else _to_numpy("temperatures", temperatures)
    rising = np.sort(given, axis=-1)
    weights = temperature_sweep(row, rising)
    figure = _new_figure(figsize)
    left, right = figure.subplots(1, 2)
    key_edges = np.arange(len(row) + 1) - 0.5
    image = left.pcolormesh(_edges(rising), key_edges, weights.T, cmap="Blues", vmin=0, vmax=1)
    left.set(title="Weights by temperature", xscale="log", xlabel="temperature", ylabel="key")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=left, label="weight")
    right.plot(rising, entropy(weights), color=BLUE, marker="o" if len(rising) < 20 else None, label="entropy")
    right.axhline(max_entropy(len(row)), color=VERMILION, linestyle="--", label=f"maximum, log {len(row)}")
    right.legend()
    right.set(title="Entropy by temperature", xscale="log", xlabel="temperature", ylabel="entropy (nats)")
    return figure


def plot_gradient_flow(flow_data: Mapping[str, Any], figsize: tuple[float, float] = (12, 4)) -> Any:
    """Draw the result of `gradient_flow_analysis`: the gradients of weights and scores, and all norms.

    `flow_data` has dL_dA and dL_dS, both (query, key), and grad_norms, from name to norm.
    """
    missing = [name for name in ("dL_dA", "dL_dS", "grad_norms") if name not in flow_data]
    if missing:
        hint = f"It lacks {', '.join(missing)}. Pass the result of gradient_flow_analysis."
        raise InputError("flow_data", expected="a mapping with dL_dA, dL_dS and grad_norms", hint=hint)
    figure = _new_figure(figsize)
    panels = figure.subplots(1, 3)
    titles = {"dL_dA": "Gradient of the weights, dL/dA", "dL_dS": "Gradient of the scores, dL/dS (rows sum to 0)"}
    for axes, (name, title) in zip(panels, titles.items(), strict=False):
        gradient = _floats("query, key", **{name: flow_data[name]})
        reach = float(np.abs(gradient).max(initial=0)) or 1.0
        image = axes.imshow(gradient, cmap="PuOr", vmin=-reach, vmax=reach, aspect="auto")
        _integer_ticks(axes)
        axes.set(title=title, xlabel="key", ylabel="query")
        figure.colorbar(image, ax=axes, label=name.replace("_", "/"))
    norms = {name: float(_to_numpy(name, norm)) for name, norm in flow_data["grad_norms"].items()}
    panels[2].barh(list(norms), list(norms.values()), color=BLUE)
    panels[2].bar_label(panels[2].containers[0], fmt="%.2g", padding=3)
    panels[2].margins(x=0.18)
    panels[2].invert_yaxis()
    panels[2].set(title="Gradient norms", xlabel="Frobenius norm")
    return figure


def plot_mask(mask: Array, title: str = "Attention Mask", figsize: tuple[float, float] = (6, 6)) -> Any:
    """Draw a mask (query, key); the legend counts the pairs."""
    allowed = _to_numpy("mask", mask)
    require_mask(allowed, allowed.shape)
    require_rank("query, key", mask=allowed)
    figure = _new_figure(figsize)
    axes: Any = figure.subplots()
    axes.imshow(allowed, cmap=ListedColormap([MASKED, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    if max(allowed.shape) <= MAX_LABELS:
        # Thin lines between the cells.
        axes.set_xticks(np.arange(1, allowed.shape[1]) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, allowed.shape[0]) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    _integer_ticks(axes)
    axes.set(title=title, xlabel="key", ylabel="query")
    count = int(allowed.sum())
    names = {BLUE: f"visible ({count} of {allowed.size})", MASKED: f"masked ({allowed.size - count})"}
    patches = [Patch(facecolor=color, label=name) for color, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    return figure


def plot_hopfield_energy(
    patterns: Array, state_trajectory: Array | None = None, figsize: tuple[float, float] = (10, 4), *, beta: float = 1.0
) -> Any:
    """Draw the modern Hopfield energy: left on a plane with patterns and trajectory, right along the trajectory.

    Patterns (num_patterns, d) with d above 2 are projected onto the plane through their mean along their first two
    principal directions. A trajectory is (step, d), such as `hopfield_retrieve(...).trajectory`; without one, the right
    panel is `energy_landscape_1d` of coordinate 0.
    """
    points = _floats("num_patterns, d", patterns=patterns)
    if points.shape[1] < 2:
        raise InputError("patterns", expected="of width 2 or more", got=points.shape[1])
    path = None if state_trajectory is None else _floats("step, d", state_trajectory=state_trajectory)
    check_arrays(patterns=(points, "num_patterns, d"), state_trajectory=(path, "step, d"))
    figure = _new_figure(figsize)
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
    """Draw heat maps of the attention weights of Q (query, width) and K (key, width) under several metrics.

    `metrics` maps names to metrics (width, width), which include the scale.
    """
    queries, keys = _floats("query, width", Q=Q), _floats("key, width", K=K)
    if not metrics:
        raise InputError("metrics", expected="at least one metric by name", got=metrics)
    weights = [
        attention_weights(attention_scores_with_metric(queries, keys, _floats("width, width", **{name: metric})))
        for name, metric in metrics.items()
    ]
    return _heat_maps(list(metrics), weights, "Attention weights under each metric", figsize)


def plot_retrieval_success(
    num_patterns: Sequence[int],
    success: Mapping[int, Any],
    title: str = "Retrieval Success against Stored Patterns",
    figsize: tuple[float, float] = (8, 5),
) -> Any:
    """Draw measured retrieval success against the number of stored patterns, a curve for each width.

    A dotted line in a curve's color marks the classical capacity at that width, if at least two patterns.

    Args:
        num_patterns: The numbers of stored patterns, rising, each at least 1.
        success: Maps each width d to the retrieved fraction at each of num_patterns, as from `retrieval_success`.
        title: Title of the figure.
        figsize: Size of the figure, in inches.
    """
    require_count(1, **{f"num_patterns[{place}]": count for place, count in enumerate(num_patterns)})
    if not success:
        raise InputError("success", expected="the curve of at least one width", got=success)
    figure = _new_figure(figsize)
    axes: Any = figure.subplots()
    for index, (width, shares) in enumerate(success.items()):
        curve = [float(share) for share in shares]
        _require_length(f"success[{width}]", curve, len(num_patterns))
        color = LINES[index % len(LINES)]
        axes.plot(num_patterns, curve, color=color, marker="o", markersize=4, label=f"d = {width}")
        if classical_capacity(width) >= 2:
            axes.axvline(classical_capacity(width), color=color, linestyle=":", linewidth=1.2)
    axes.plot([], [], color="0.4", linestyle=":", label="classical capacity, 0.138 d")
    axes.set(title=title, xscale="log", xlabel="stored patterns", ylabel="share retrieved", ylim=(-0.04, 1.04))
    figure.legend(loc="outside right upper")
    return figure


def _edges(rising: Any) -> Any:
    """Return borders of cells around rising positive numbers, halfway in the logarithm."""
    logs = np.log(rising)
    if len(logs) == 1:
        return np.exp([logs[0] - 1, logs[0] + 1])
    between = (logs[1:] + logs[:-1]) / 2
    return np.exp([2 * logs[0] - between[0], *between, 2 * logs[-1] - between[-1]])


def _draw_energy_plane(axes: Any, patterns: Any, path: Any, beta: float) -> None:
    """Draw contours of the energy on the plane that `plot_hopfield_energy` describes."""
    origin, directions, title, names = _plane(patterns)
    on_plane = (patterns - origin) @ directions.T
    trail = None if path is None else (path - origin) @ directions.T
    points = on_plane if trail is None else np.concatenate([on_plane, trail])
    margin = 0.25 * max(float(np.ptp(points, axis=0).max()), 1e-3)
    across, up = (np.linspace(float(line.min()) - margin, float(line.max()) + margin, 120) for line in points.T)
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
    """Return a point and two orthonormal directions of the plane to draw, its title and its axes' names."""
    if patterns.shape[1] == 2:
        return np.zeros(2), np.eye(2), "Energy and patterns", ("coordinate 0", "coordinate 1")
    mean = patterns.mean(axis=0)
    names = ("first principal direction", "second principal direction")
    return mean, np.linalg.svd(patterns - mean)[2][:2], "Energy on the patterns' principal plane", names


def _new_figure(figsize: tuple[float, float] | None) -> Any:
    return Figure(figsize=figsize, layout="constrained")


def _to_numpy(name: str, array: Array) -> Any:
    """Return the array as a NumPy array without gradient, half precision as float32."""
    _, array = unify(**{name: array})
    array = accumulate(array) if is_floating(array) else array
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def _floats(axes: str, **named: Array) -> Any:
    """Return the one named array as a NumPy array, after checking that it is floating and has these axes."""
    ((name, array),) = named.items()
    return check_arrays(**{name: (_to_numpy(name, array), axes)})[1]


def _require_length(name: str, given: Sequence[Any], length: int) -> None:
    if len(given) != length:
        raise InputError(name, expected=f"of length {length}", got=len(given))


def _heat_map(axes: Any, weights: Any, cmap: str, largest: float) -> Any:
    shown = np.ma.masked_equal(weights, 0)
    image = axes.imshow(shown, cmap=cmap, vmin=0, vmax=largest or 1.0, aspect="auto", interpolation="nearest")
    image.set_cmap(image.get_cmap().with_extremes(bad=MASKED))
    _integer_ticks(axes)
    return image


def _heat_maps(names: Sequence[str], weights: Sequence[Any], title: str, figsize: tuple[float, float] | None) -> Any:
    """Draw up to four heat maps a row, on one color scale."""
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    figure = _new_figure(figsize or (3.2 * columns + 1, 3.3 * rows + 0.4))
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(names))]
    largest = float(max(matrix.max(initial=0) for matrix in weights))
    image: Any = None
    for place, (axes, name, matrix) in enumerate(zip(panels, names, weights, strict=True)):
        image = _heat_map(axes, matrix, "Blues", largest)
        spread = float(attention_entropy(matrix).mean())
        axes.set_title(f"{name}\nmean entropy {spread:.2f} nats", fontsize="medium")
        axes.set_xlabel("key" if place + columns >= len(names) else "")
        axes.set_ylabel("query" if place % columns == 0 else "")
    figure.suptitle(title)
    figure.colorbar(image, ax=panels, label=_weight_label(*weights))
    return figure


def _weight_label(*weights: Any) -> str:
    return "weight (gray: exactly 0)" if any((matrix == 0).any() for matrix in weights) else "weight"


def _integer_ticks(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _name_ticks(axis: Any, labels: Sequence[str] | None, size: int, name: str) -> None:
    """Label all ticks, or evenly spaced ones if there are too many to read."""
    if labels is None:
        return
    _require_length(name, labels, size)
    places = range(0, size, math.ceil(size / MAX_LABELS))
    named = [str(labels[place]) for place in places]
    crowded = axis.axis_name == "x" and sum(map(len, named)) > 40
    axis.set_ticks(places, named, rotation=90 if crowded else 0)
