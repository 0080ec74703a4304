"""What each remedy does to a trained model, as panels."""

from __future__ import annotations

import statistics

from tidegate.lab.studies.drawing import interval_panel
from tidegate.lab.studies.gate_tuning.run import CONTROL, GateTuningResult
from tidegate.report.page import CellValue, Column, Intervals, Section, Table

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
    measured = {"before": result.before, **{row.remedy.name: row.measured for row in result.rows}}
    rows: list[tuple[CellValue, ...]] = []
    for name, models in measured.items():
        means = (statistics.fmean(getattr(each, part) for each in models) for part in ("loss", "sink", "strongest"))
        movements = [each.movement for each in models if each.movement is not None]
        rows.append((name, *means, statistics.fmean(movements) if movements else None))
    return Table(title="Means over seeds", columns=columns, rows=tuple(rows))


def _intervals(result: GateTuningResult, name: str) -> Intervals:
    changes = {row.remedy.name: getattr(row, name) for row in result.rows if getattr(row, name) is not None}
    return interval_panel(_CHANGES[name], "difference, 95 % intervals over seeds", changes, form="+.4f")
