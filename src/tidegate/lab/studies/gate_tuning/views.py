"""What each remedy does to a trained model, as panels and a figure."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from tidegate.lab.studies.drawing import COLOURS, GREY, label_axes, new_figure
from tidegate.lab.studies.gate_tuning.run import CONTROL, Change, GateTuningResult, RemedyRow
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Column, Estimate, Intervals, Section, Table

_CHANGES = {
    "loss": "Loss after, less loss before",
    "against_control": f"Loss less that of {CONTROL.name}",
    "sink": "Attention to the start after, less before",
    "strongest": "Attention to the start in the head with most of it, after less before",
}


def view(result: GateTuningResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    return StudyView(sections=_sections(result), figures=_figures(result))


def _sections(result: GateTuningResult) -> tuple[Section, ...]:
    """The table of remedies, and their changes with intervals."""
    options = result.options
    lead = (
        f"A Llama of {result.num_parameters:,} weights, {options.training_steps} steps of {options.batch_size} × "
        f"{options.length} bytes; then {options.tuning_steps} steps with {result.num_gate_parameters:,} weights of "
        f"gates, base rate {options.base_rate:g}, {options.num_seeds} seeds. Each interval holds by itself."
    )
    return (
        Section(title="Remedies", lead=lead, panels=(_table(result), *(_intervals(result, name) for name in _CHANGES))),
    )


def _figures(result: GateTuningResult) -> dict[str, Figure]:
    """Changes of loss and of attention to the start, with intervals, one row a remedy."""
    figure = new_figure(8.6, 2.8)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name in ((left, "loss"), (right, "sink")):
        label_axes(axes, title=_CHANGES[name], x="nats a byte" if name == "loss" else "share of attention")
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.locator_params(axis="x", nbins=5)
        for place, row in enumerate(result.rows):
            _draw_change(axes, getattr(row, name), place, COLOURS[row.remedy.whole_rate is not None])
    left.set_yticks(range(len(result.rows)), [row.remedy.name for row in result.rows])
    left.invert_yaxis()
    return {"gate-tuning.svg": figure}


def _draw_change(axes: Any, change: Change, place: int, colour: str) -> None:
    axes.plot([change.low, change.high], [place, place], color=colour, linewidth=1.2)
    axes.plot([change.value], [place], "o", color=colour, markersize=4)


def _table(result: GateTuningResult) -> Table:
    columns = (
        Column(title="remedy"),
        Column(title="loss", unit="nats a byte", digits=4, better="low"),
        Column(title="attention to the start", digits=4, help="The mean over layers, heads and queries."),
        Column(title="in the strongest head", digits=4),
        Column(title="mean |gate − 1|", digits=4),
    )
    before = (
        "before",
        statistics.fmean(each.loss for each in result.before),
        statistics.fmean(each.sink for each in result.before),
        statistics.fmean(each.strongest for each in result.before),
        None,
    )
    return Table(title="Means over seeds", columns=columns, rows=(before, *(_cells(row) for row in result.rows)))


def _cells(row: RemedyRow) -> tuple[str, float, float, float, float | None]:
    movements = [each.movement for each in row.measured if each.movement is not None]
    return (
        row.remedy.name,
        statistics.fmean(each.loss for each in row.measured),
        statistics.fmean(each.sink for each in row.measured),
        statistics.fmean(each.strongest for each in row.measured),
        statistics.fmean(movements) if movements else None,
    )


def _intervals(result: GateTuningResult, name: str) -> Intervals:
    changes = {row.remedy.name: getattr(row, name) for row in result.rows if getattr(row, name) is not None}
    return Intervals(
        title=_CHANGES[name],
        alternative="; ".join(f"{remedy} {change.value:+.4f}" for remedy, change in changes.items()),
        x_label="difference, 95 % intervals over seeds",
        items=tuple(
            Estimate(label=remedy, value=change.value, low=change.low, high=change.high)
            for remedy, change in changes.items()
        ),
    )
