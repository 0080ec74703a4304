"""Curves of a comparison: loss over the course of training, and beyond the training length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from tidegate.lab.compare.summary import Summary
from tidegate.lab.judging import t_interval
from tidegate.lab.training.records import Record
from tidegate.report.page import Lines, Numbers, Series, View, Views, mean_of_known


def loss_views(summary: Summary) -> Views:
    """Return validation loss against tokens, FLOPs and time."""
    examples = summary.examples
    axes: list[tuple[str, str, Callable[[Record], Numbers]]] = [
        (examples, f"{examples} seen (millions)", lambda r: tuple(p.tokens / 1e6 for p in r.curve)),
        ("FLOPs", "training FLOPs (10¹²)", lambda r: tuple(p.flops / 1e12 for p in r.curve)),
        ("time", "training time (seconds)", lambda r: r.timing.seconds if r.timing else ()),
    ]
    ends = ", ".join(f"{v.name} {v.result.mean:.4f}" for v in summary.variants if v.result.mean is not None)
    views = tuple(
        View(
            label=f"against {name}",
            panel=Lines(
                title=f"Validation loss against {name}",
                alternative=f"Validation loss against {name}. Final means, in nats: {ends or 'none'}.",
                x_label=label,
                y_label="validation loss (nats)",
                series=seeds_and_mean(summary, axis, lambda r: tuple(point.loss for point in r.curve)),
            ),
        )
        for name, label, axis in axes
    )
    return Views(title="Loss over the course of training", views=views)


def difference_panel(summary: Summary) -> Lines:
    """Return the mean difference from the baseline at each evaluation, paired by seed, with pointwise intervals."""
    series: list[Series] = []
    for variant in summary.variants:
        records = zip(variant.records, summary.control.records, strict=True)
        pairs = [(own, other) for own, other in records if own.status == other.status == "finished"]
        if variant.name == summary.plan.control or not pairs:
            continue
        columns = _known_columns([_differences(own, other) for own, other in pairs])
        intervals = [t_interval(column) if len(column) > 1 else (None, None) for column in columns]
        share = tuple(100 * point.tokens / pairs[0][0].tokens for point in pairs[0][0].curve)[: len(columns)]
        series.append(
            Series(
                label=variant.name,
                group=variant.name,
                x=share,
                y=tuple(fmean(column) if column else None for column in columns),
                low=tuple(low for low, _ in intervals) if len(pairs) > 1 else None,
                high=tuple(high for _, high in intervals) if len(pairs) > 1 else None,
            )
        )
    ends = ", ".join(
        f"{v.name} {v.result.difference:+.4f}" for v in summary.variants if v.result.difference is not None
    )
    return Lines(
        title=f"Difference from the baseline ({summary.plan.control}), paired by seed: below zero is better",
        alternative=f"Mean difference from the baseline at each evaluation, paired by seed, with pointwise "
        f"95 % confidence bands. Final differences, in nats: {ends or 'none'}.",
        x_label="share of the training (percent)",
        y_label="loss minus the baseline's (nats)",
        series=tuple(series),
        zero_line=True,
    )


def length_panel(summary: Summary) -> Lines | None:
    """Return the loss by position, up to four times the training length; None if the task has no length."""
    if not any(record.loss_by_position for variant in summary.variants for record in variant.finished):
        return None
    length = summary.plan.task.length
    assert length is not None
    series = seeds_and_mean(
        summary,
        lambda r: tuple(position for position, _ in r.loss_by_position),
        lambda r: tuple(loss for _, loss in r.loss_by_position),
    )
    beyond = {
        line.label: mean_of_known(y for x, y in zip(line.x, line.y, strict=True) if x is not None and x > length)
        for line in series
        if not line.faint
    }
    means = ", ".join(f"{name} {mean:.3f}" for name, mean in beyond.items() if mean is not None)
    return Lines(
        title="Loss by position",
        alternative=f"Loss by position up to {4 * length}. Means beyond the training length of {length}, in nats: "
        f"{means or 'none'}.",
        x_label="position (tokens)",
        y_label="loss at the position (nats)",
        series=series,
        marker=float(length),
        marker_label="training length",
    )


def seeds_and_mean(
    summary: Summary, x: Callable[[Record], Numbers], y: Callable[[Record], Sequence[float | None]]
) -> tuple[Series, ...]:
    """Return a thin line for each run and a bold one for the mean of each variant."""
    series: list[Series] = []
    for variant in summary.variants:
        for record in variant.records:
            label = f"{variant.name}, seed {record.run.seed}"
            if xs := x(record):
                series.append(Series(label=label, group=variant.name, x=xs, y=tuple(y(record)), faint=True))
    for variant in summary.variants:
        if drawn := [record for record in variant.finished if x(record)]:
            xs, ys = (
                tuple(fmean(column) if column else None for column in _known_columns([values(r) for r in drawn]))
                for values in (x, y)
            )
            series.append(Series(label=variant.name, group=variant.name, x=xs, y=ys))
    return tuple(series)


def _known_columns(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return the known numbers of each column, up to the length of the shortest row."""
    return [[value for value in column if value is not None] for column in zip(*rows, strict=False)]


def _differences(record: Record, control: Record) -> Numbers:
    points = zip(record.curve, control.curve, strict=False)
    return tuple(None if own.loss is None or other.loss is None else own.loss - other.loss for own, other in points)
