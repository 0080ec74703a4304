"""What the tuning runs say: the loss of every variant at every learning rate and start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TypeAlias

from tidegate.lab.compare.summary import Summary
from tidegate.lab.compare.tuning import rate_of, start_of
from tidegate.lab.training.records import Record
from tidegate.report.page import Column, Lines, Panel, Series, Table, View, Views

_Losses: TypeAlias = dict[str, dict[float, list[float | None]]]
"""By variant and learning rate, one of each block; None where the run diverged."""


def tuning_panels(summary: Summary) -> Iterator[Panel]:
    """Draw loss against learning rate; nothing if nothing was tuned.

    Where all of the grid was tried there is a view for each start; else one, at the start that each block chose.
    """
    if not summary.tuning:
        return
    starts = list(dict.fromkeys(start_of(record) for record in summary.tuning))
    if summary.plan.grid is not None and summary.plan.grid.search == "stepwise":
        yield _start_table(summary, starts)
        yield _lines(summary, _at_best_start(summary.tuning), "From the start that each block chose")
        return
    views = (
        (start, _lines(summary, [r for r in summary.tuning if start_of(r) == start], f"Starting from {start}"))
        for start in starts
    )
    yield Views(
        title="Loss against learning rate",
        views=tuple(View(label=f"init {start}", panel=panel) for start, panel in views),
    )


def _start_table(summary: Summary, starts: Sequence[str]) -> Table:
    """The mean loss of every variant from each start, at the middle rate, where all blocks tried them."""
    rows: list[tuple[str | float | None, ...]] = []
    for variant in summary.variants:
        own = [record for record in summary.tuning if record.run.variant == variant.name]
        middle = sorted({rate_of(record) for record in own})
        at_middle = [record for record in own if middle and rate_of(record) == middle[len(middle) // 2]]
        means = (_mean([record.loss for record in at_middle if start_of(record) == start]) for start in starts)
        rows.append((variant.name, *means))
    return Table(
        title="Loss by the start of the weights, at the middle learning rate",
        columns=(
            Column(title="variant"),
            *(Column(title=f"init {start}", unit="nats", digits=4, better="low") for start in starts),
        ),
        rows=tuple(rows),
        note="Means over blocks of the runs that tuned; empty where one diverged.",
    )


def _at_best_start(records: Sequence[Record]) -> list[Record]:
    """Of each variant in each block, the records at the start at which it tried every rate."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.run.variant, record.run.block, start_of(record)), []).append(record)
    most = max(map(len, groups.values()))
    return [record for group in groups.values() if len(group) == most for record in group]


def _lines(summary: Summary, records: Sequence[Record], where: str) -> Lines:
    losses = _losses(records)
    series = tuple(
        Series(label=variant.name, group=variant.name, x=tuple(own), y=tuple(_mean(own[rate]) for rate in own))
        for variant in summary.variants
        if (own := losses.get(variant.name))
    )
    best = {
        line.label: min(((y, x) for x, y in zip(line.x, line.y, strict=True) if y is not None), default=None)
        for line in series
    }
    words = ", ".join(f"{name} {point[0]:.4f} at {point[1]:g}" for name, point in best.items() if point is not None)
    return Lines(
        title=f"{where}, lowest loss: {words or 'every run diverged'}",
        alternative=f"{where}: loss of the tuning runs against their learning rate; lowest: {words}.",
        x_label="learning rate",
        y_label="loss (nats), mean over blocks; none where a run diverged",
        series=series,
        log_x=True,
    )


def _losses(records: Sequence[Record]) -> _Losses:
    found: _Losses = {}
    for record in sorted(records, key=rate_of):
        found.setdefault(record.run.variant, {}).setdefault(rate_of(record), []).append(record.loss)
    return found


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known and len(known) == len(losses) else None
