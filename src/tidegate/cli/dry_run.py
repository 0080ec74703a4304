"""What `tidegate train --dry-run` says."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from tidegate._text import number_of
from tidegate.cli.console import new_console, new_table, print_json

if TYPE_CHECKING:
    from tidegate.lab.training.engine.parallel import Parallel
    from tidegate.lab.training.estimate import Estimate
    from tidegate.lab.training.run import Run, Training


def print_estimate(
    run: Run, *, flops: float | None, mfu: float, parallel: Parallel, num_processes: int, as_json: bool = False
) -> None:
    """Print what a run would take here, in each of its processes, and at a rate of operations if one is given."""
    from tidegate.lab.training.estimate import estimate_run

    estimate = estimate_run(run)
    in_each = estimate.bytes_in_each(parallel, num_processes)
    if as_json:
        there = None if flops is None else estimate.hours_at(flops, mfu)
        more = {"bytes_in_each_process": in_each, "lr": run.training.lr, "hours": estimate.hours, "hours_there": there}
        print_json({**asdict(estimate), **more})
        return
    table = new_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    rows = _estimate_rows(estimate, run.training, flops=flops, mfu=mfu)
    if num_processes > 1:
        how = f"of {num_processes} processes, {parallel}; what they exchange comes on top; hours are those of one"
        rows.append(("memory in each", _memory(in_each), how))
    for row in rows:
        table.add_row(*row)
    new_console().print(table)


def _estimate_rows(
    estimate: Estimate, training: Training, *, flops: float | None, mfu: float
) -> list[tuple[str, str, str]]:
    """What a dry run says: a name, a number, and how it comes about."""
    per_update = estimate.tokens // estimate.steps
    rows = [
        ("parameters", f"{estimate.num_parameters:,}", f"{estimate.num_gate_parameters:,} of them in gates"),
        ("tokens", f"{estimate.tokens:,}", f"{number_of(estimate.steps, 'update')} of {per_update:,}"),
        ("learning rate", f"{training.lr:.3g}", f"{training.optimizer}, {training.precision}"),
        ("FLOPs", f"{estimate.flops:.3g}", f"{estimate.flops / estimate.tokens:.3g} for each token"),
        (
            "memory",
            _memory(estimate.bytes),
            f"{_memory(estimate.weight_bytes)} for weights and updates, {_memory(estimate.activation_bytes)} for a "
            f"batch in {number_of(training.accumulate, 'part')}",
        ),
    ]
    if estimate.step_seconds is None or estimate.hours is None or estimate.flops_per_second is None:
        rows.append(("hours here", "?", f"not measured: {estimate.why_not_measured}"))
    else:
        how = f"{per_update / estimate.step_seconds:,.0f} tokens/s, {estimate.flops_per_second:.3g} FLOP/s, measured"
        rows.append(("hours here", f"{estimate.hours:.3g}", how))
    if flops is not None:
        how = f"at {mfu:g} of {flops:.3g} FLOP/s"
        rows.append(("hours there", f"{estimate.hours_at(flops, mfu):.3g}", how))
    return rows


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
