"""What each remedy does to a trained model, as panels."""

from __future__ import annotations

import statistics

from tidegate.lab.studies.gate_tuning.run import CONTROL, GateTuningResult, RemedyRow
from tidegate.report.page import Column, Estimate, Intervals, Section, Table

_CHANGES = {
    "loss": "Loss after, less loss before",
    "against_control": f"Loss less that of {CONTROL.name}",
    "sink": "Attention to the start after, less before",
    "strongest": "Attention to the start in the head with most of it, after less before",
}


def view(result: GateTuningResult) -> tuple[Section, ...]:
    """Show the table of remedies, and their changes with intervals."""
    options = result.options
    lead = (
        f"A Llama of {result.num_parameters:,} weights, {options.training_steps} steps of {options.batch_size} × "
        f"{options.length} bytes; then {options.tuning_steps} steps with {result.num_gate_parameters:,} weights of "
        f"gates, base rate {options.base_rate:g}, {options.num_seeds} seeds. Each interval holds by itself."
    )
    return (
        Section(title="Remedies", lead=lead, panels=(_table(result), *(_intervals(result, name) for name in _CHANGES))),
    )


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
