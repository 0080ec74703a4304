"""What the tuning runs say: the loss of every variant at every learning rate and start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TypeAlias

from tidegate.lab.compare.summary import Summary
from tidegate.lab.training.records import Record
from tidegate.report.page import Lines, Panel, Series, View, Views

_Losses: TypeAlias = dict[str, dict[float, list[float | None]]]
"""By variant and learning rate, one of each block; None where the run diverged."""


def tuning_panels(summary: Summary) -> Iterator[Panel]:
    """Draw loss against learning rate, a view for each start; nothing if nothing was tuned."""
    starts = list(dict.fromkeys(_start(record) for record in summary.tuning))
    if starts:
        views = tuple(View(label=f"init {start}", panel=_lines(summary, start)) for start in starts)
        yield Views(title="Loss against learning rate", views=views)


def _lines(summary: Summary, start: str) -> Lines:
    losses = _losses([record for record in summary.tuning if _start(record) == start])
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
        title=f"Starting from {start}, lowest: {words or 'every run diverged'}",
        alternative=f"Loss against learning rate of the tuning runs that start from {start}; lowest: {words}.",
        x_label="learning rate",
        y_label="loss (nats), mean over blocks; none where a run diverged",
        series=series,
        log_x=True,
    )


def _losses(records: Sequence[Record]) -> _Losses:
    found: _Losses = {}
    for record in sorted(records, key=lambda record: record.run["training"]["lr"]):
        by_rate = found.setdefault(record.run["variant"], {})
        by_rate.setdefault(record.run["training"]["lr"], []).append(record.loss)
    return found


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def _start(record: Record) -> str:
    return str(record.run["model"]["init"])
