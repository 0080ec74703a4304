"""Where the weight of attention goes: as a table, and as a picture of shares and heads."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.sinks.run import Shares, SinksResult, heads_of, shares_of
from tidegate.report.page import Column, Section, Table
from tidegate.tensors.palette import BLUE, VERMILION

_SHARES = {"first key": VERMILION, "sink": BLUE, "other keys": "#D9D9D9"}
_READABLE = 0.09
"""Share of a bar that is wide enough for its number."""


def view(result: SinksResult) -> tuple[Section, ...]:
    """Show the mean shares of the weight by gate."""
    options = result.options
    columns = (
        Column(title="gate"),
        Column(title="loss", unit="nats a byte", digits=3, better="low"),
        Column(title="first key", digits=3, help="Mean over layers, heads and queries."),
        Column(title="first key, strongest head", digits=3),
        Column(title="sink", digits=3),
        Column(title="other keys", digits=3),
        Column(title="what the first key adds", digits=3, help="In units of the layer's output."),
    )
    rows = tuple(
        (gate, shares.loss, shares.first_key, shares.strongest, shares.sink, shares.other_keys, shares.contribution)
        for gate in options.gates
        for shares in [shares_of(result.of(gate))]
    )
    lead = (
        f"{options.num_layers} layers of {options.num_heads} heads, {options.steps} steps of {options.batch_size} × "
        f"{options.length} bytes behind a token that stands for the start, {options.num_seeds} seeds."
    )
    table = Table(title="Weight of attention, means over seeds", columns=columns, rows=rows)
    return (Section(title="Where the weight goes", lead=lead, panels=(table,)),)


def figures(result: SinksResult) -> dict[str, Figure]:
    """Draw shares of the weight by gate; then by head weights on first key and sink, and what the first key adds."""
    gates = result.options.gates
    figure = new_figure(10.4, 1.1 + 0.42 * len(gates))
    shares, *by_head = figure.subplots(1, 4, sharey=True, width_ratios=(1.2, 1, 1, 1))
    label_axes(shares, title="All weight, mean over heads", x="share of the weight")
    for place, gate in enumerate(gates):
        _draw_shares(shares, place, shares_of(result.of(gate)))
    panels = {
        "Weight on the first key": ("share of the weight", "first_key", VERMILION),
        "Weight on the sink": ("share of the weight", "sink", BLUE),
        "What the first key adds": ("size, in units of the layer's output", "contribution", VERMILION),
    }
    for axes, (title, (x, name, colour)) in zip(by_head, panels.items(), strict=True):
        label_axes(axes, title=title, x=x)
        for place, gate in enumerate(gates):
            _draw_heads(axes, place, heads_of(getattr(model, name) for model in result.of(gate)), colour)
        axes.set_xlim(left=0)
    by_head[0].axvline(result.even_share, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
    shares.set_xlim(0, 1)
    shares.grid(visible=False)
    shares.set_yticks(range(len(gates)), gates, fontsize=8)
    shares.invert_yaxis()
    handles = [
        *(Patch(color=colour, label=label) for label, colour in _SHARES.items()),
        Line2D([], [], color=GREY, marker="o", markersize=3, linestyle="", label="one head of one seed"),
        Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=1.4, linestyle="", label="mean"),
        Line2D([], [], color=GREY, linewidth=0.9, linestyle="--", label="if all keys had equal weight"),
    ]
    figure.legend(handles=handles, fontsize=7, frameon=False, loc="outside lower center", ncols=6)
    return {"sinks.svg": figure}


def _draw_shares(axes: Any, place: int, shares: Shares) -> None:
    """Draw one bar of length 1: the first key, the sink if there is one, and all other keys."""
    start = 0.0
    widths = (shares.first_key, shares.sink or 0.0, shares.other_keys)
    for share, colour in zip(widths, _SHARES.values(), strict=True):
        axes.barh(place, share, left=start, color=colour, height=0.62)
        if share > _READABLE:
            ink = "white" if colour == BLUE else "black"
            axes.text(start + share / 2, place, f"{share:.2f}", ha="center", va="center", fontsize=7, color=ink)
        start += share


def _draw_heads(axes: Any, place: int, values: list[float], colour: str) -> None:
    """Draw a dot for each head of each seed, one below the other, and a line at their mean; words where none is."""
    if not values:
        axes.text(0.02, place, "no sink", transform=axes.get_yaxis_transform(), va="center", fontsize=7, color=GREY)
        return
    heights = place + np.linspace(-0.26, 0.26, len(values))
    axes.plot(values, heights, "o", color=colour, markersize=3, alpha=0.75, markeredgewidth=0)
    axes.vlines(np.mean(values), place - 0.36, place + 0.36, color="black", linewidth=1.4)
