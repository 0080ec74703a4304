"""Where the weight of attention goes, as a table and a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.sinks.run import Shares, SinksResult, heads_of, shares_of
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Column, Section, Table
from tidegate.tensors.palette import BLUE, VERMILION

_PALE = "#D9D9D9"
_READABLE = 0.09
"""Share of a bar that is wide enough for its number."""


def view(result: SinksResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    return StudyView(sections=_sections(result), figures={"sinks.svg": _figure(result)})


def _sections(result: SinksResult) -> tuple[Section, ...]:
    options = result.options
    lead = (
        f"{options.num_layers} layers of {options.num_heads} heads, {options.steps} steps of {options.batch_size} × "
        f"{options.length} bytes behind a token that stands for the start, {options.num_seeds} seeds."
    )
    return (Section(title="Where the weight goes", lead=lead, panels=(_table(result),)),)


def _table(result: SinksResult) -> Table:
    columns = (
        Column(title="gate"),
        Column(title="loss", unit="nats a byte", digits=3, better="low"),
        Column(title="first key", digits=3, help="Mean over layers, heads and queries."),
        Column(title="first key, strongest head", digits=3),
        Column(title="sink", digits=3),
        Column(title="other keys", digits=3),
        Column(title="what the first key adds", digits=3, help="In units of the layer's output."),
    )
    rows = []
    for gate in result.options.gates:
        shares = shares_of(result.of(gate))
        rows.append(
            (gate, shares.loss, shares.first_key, shares.strongest, shares.sink, shares.other_keys, shares.contribution)
        )
    return Table(title="Weight of attention, means over seeds", columns=columns, rows=tuple(rows))


def _figure(result: SinksResult) -> Figure:
    """Shares of the weight by gate; then by head the first key's weight, the sink's, and what the first key adds."""
    gates = result.options.gates
    figure = new_figure(10.4, 1.1 + 0.42 * len(gates))
    shares, *by_head = figure.subplots(1, 4, sharey=True, width_ratios=(1.2, 1, 1, 1))
    label_axes(shares, title="All weight, mean over heads", x="share of the weight")
    for axes, title, x in zip(
        by_head, _TITLES, ("share of the weight",) * 2 + ("size, in units of the layer's output",), strict=True
    ):
        label_axes(axes, title=title, x=x)
    for place, gate in enumerate(gates):
        models = result.of(gate)
        _draw_shares(shares, place, shares_of(models))
        first_key, sink, contribution = by_head
        _draw_heads(first_key, place, heads_of(model.first_key for model in models), VERMILION)
        _draw_heads(sink, place, heads_of(model.sink for model in models), BLUE)
        _draw_heads(contribution, place, heads_of(model.contribution for model in models), VERMILION)
    by_head[0].axvline(result.even_share, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
    shares.set_xlim(0, 1)
    shares.grid(visible=False)
    for axes in by_head:
        axes.set_xlim(left=0)
    shares.set_yticks(range(len(gates)), gates, fontsize=8)
    shares.invert_yaxis()
    figure.legend(handles=_legend(), fontsize=7, frameon=False, loc="outside lower center", ncols=6)
    return figure


_TITLES = ("Weight on the first key", "Weight on the sink", "What the first key adds")


def _legend() -> list[Any]:
    bars = {"first key": VERMILION, "sink": BLUE, "other keys": _PALE}
    return [
        *(Patch(color=colour, label=label) for label, colour in bars.items()),
        Line2D([], [], color=GREY, marker="o", markersize=3, linestyle="", label="one head of one seed"),
        Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=1.4, linestyle="", label="mean"),
        Line2D([], [], color=GREY, linewidth=0.9, linestyle="--", label="if all keys had equal weight"),
    ]


def _draw_shares(axes: Any, place: int, shares: Shares) -> None:
    """One bar of length 1: the first key, the sink if there is one, and all other keys."""
    start = 0.0
    for share, colour, ink in (
        (shares.first_key, VERMILION, "black"),
        (shares.sink or 0.0, BLUE, "white"),
        (shares.other_keys, _PALE, "black"),
    ):
        axes.barh(place, share, left=start, color=colour, height=0.62)
        if share > _READABLE:
            axes.text(start + share / 2, place, f"{share:.2f}", ha="center", va="center", fontsize=7, color=ink)
        start += share


def _draw_heads(axes: Any, place: int, values: list[float], colour: str) -> None:
    """A dot for each head of each seed, one below the other, and a line at their mean; words where there is none."""
    if not values:
        axes.text(0.02, place, "no sink", transform=axes.get_yaxis_transform(), va="center", fontsize=7, color=GREY)
        return
    heights = place + np.linspace(-0.26, 0.26, len(values))
    axes.plot(values, heights, "o", color=colour, markersize=3, alpha=0.75, markeredgewidth=0)
    axes.vlines(np.mean(values), place - 0.36, place + 0.36, color="black", linewidth=1.4)
