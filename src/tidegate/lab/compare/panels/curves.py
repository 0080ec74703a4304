"""Curves of a comparison: loss in the course of the training, and beyond the training length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.judging import t_interval
from tidegate.lab.training.records import Record
from tidegate.report.page import Lines, Numbers, Series, View, Views

_MANY_TOKENS = 1e6
_MANY_FLOPS = 1e12


def loss_views(summary: Summary) -> Views:
    """Validation loss against tokens, FLOPs and time."""
    examples = summary.examples
    axes: list[tuple[str, str, Callable[[Record], Numbers]]] = [
        (examples, f"{examples} seen (millions)", lambda r: tuple(p.tokens / _MANY_TOKENS for p in r.curve)),
        ("FLOPs", "training FLOPs (10¹²)", lambda r: tuple(p.flops / _MANY_FLOPS for p in r.curve)),
        ("time", "time spent on training (seconds)", lambda r: r.timing.seconds if r.timing else ()),
    ]
    views = tuple(
        View(
            label=f"against {name}",
            panel=Lines(
                title=_loss_title(summary),
                alternative=_ends_in_words(summary, f"Validation loss against {name}"),
                x_label=label,
                y_label="validation loss (nats)",
                series=seeds_and_mean(summary, axis, lambda r: tuple(point.loss for point in r.curve)),
            ),
        )
        for name, label, axis in axes
    )
    return Views(title="Loss in the course of the training", views=views)


def difference_panel(summary: Summary) -> Lines:
    """The mean difference to the control at each evaluation, within seeds, with pointwise intervals."""
    series: list[Series] = []
    for variant in summary.variants:
        pairs = _finished_pairs(variant, summary.control)
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
    return Lines(
        title=f"Difference to {summary.plan.control} under the same seed: below zero is better",
        alternative=_difference_in_words(summary),
        x_label="share of the training (percent)",
        y_label=f"loss minus that of {summary.plan.control} (nats)",
        series=tuple(series),
        zero_line=True,
    )


def length_panel(summary: Summary) -> Lines | None:
    """Loss by position, up to four times the training length; None where the task has no length."""
    if not any(record.loss_by_position for variant in summary.variants for record in variant.finished):
        return None
    length = summary.plan.task.length
    assert length is not None
    series = seeds_and_mean(
        summary,
        lambda r: tuple(position for position, _ in r.loss_by_position),
        lambda r: tuple(loss for _, loss in r.loss_by_position),
    )
    title, what = _beyond(series, length)
    return Lines(
        title=title,
        alternative=f"Loss by position up to {4 * length}. {what}",
        x_label="position (tokens)",
        y_label="loss at that position (nats)",
        series=series,
        marker=float(length),
        marker_label="training length",
    )


def seeds_and_mean(
    summary: Summary, x: Callable[[Record], Numbers], y: Callable[[Record], Sequence[float | None]]
) -> tuple[Series, ...]:
    """Of each variant the runs, faint, and their mean, bold."""
    series: list[Series] = []
    for variant in summary.variants:
        for record in variant.records:
            label = f"{variant.name}, seed {record.run.seed}"
            if xs := x(record):
                series.append(Series(label=label, group=variant.name, x=xs, y=tuple(y(record)), faint=True))
    for variant in summary.variants:
        if drawn := [record for record in variant.finished if x(record)]:
            xs, ys = (_means([function(record) for record in drawn]) for function in (x, y))
            series.append(Series(label=variant.name, group=variant.name, x=xs, y=ys))
    return tuple(series)


def _means(rows: Sequence[Sequence[float | None]]) -> Numbers:
    return tuple(fmean(column) if column else None for column in _known_columns(rows))


def _known_columns(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Collect the numbers of each column, up to the length of the shortest row; a column of gaps is empty."""
    return [[value for value in column if value is not None] for column in zip(*rows, strict=False)]


def _finished_pairs(variant: VariantSummary, control: VariantSummary) -> list[tuple[Record, Record]]:
    pairs = zip(variant.records, control.records, strict=True)
    return [(own, other) for own, other in pairs if own.status == other.status == "finished"]


def _differences(record: Record, control: Record) -> Numbers:
    """One a point of the curves; None where either has no number."""
    points = zip(record.curve, control.curve, strict=False)
    return tuple(None if own.loss is None or other.loss is None else own.loss - other.loss for own, other in points)


def _beyond(series: Sequence[Series], length: int) -> tuple[str, str]:
    """What becomes of the loss beyond the training length, as a title and as a sentence.

    Tasks that ask nothing within the training length have a loss there, and no change to it.
    """
    bold = [line for line in series if not line.faint]
    beyond = {line.label: fmean(ys) for line in bold if (ys := _between(line, length, math.inf))}
    inside = {line.label: fmean(ys) for line in bold if (ys := _between(line, length / 2, length))}
    place = f"Beyond the training length of {length} tokens"
    if changes := ", ".join(f"{name} {beyond[name] - inside[name]:+.3f}" for name in beyond if name in inside):
        what = "Change from the second half of the training length to the positions beyond it, in nats"
        return f"{place} the loss changes by (nats): {changes}", f"{what}: {changes}."
    if means := ", ".join(f"{name} {loss:.3f}" for name, loss in beyond.items()):
        return f"{place} the loss is on average (nats): {means}", f"Means beyond the training length, in nats: {means}."
    return "Nothing was measured beyond the training length", "No position lies beyond the training length."


def _between(line: Series, low: float, high: float) -> list[float]:
    """The numbers of a line above `low` and up to `high`."""
    pairs = zip(line.x, line.y, strict=True)
    return [y for x, y in pairs if x is not None and y is not None and low < x <= high]


def _loss_title(summary: Summary) -> str:
    whole = [variant for variant in summary.variants if variant.finished and not variant.result.num_diverged]
    means = {variant.name: variant.result.mean for variant in whole if variant.result.mean is not None}
    if not means:
        return "No variant reached the end of its training under every seed"
    lowest, highest = min(means.values()), max(means.values())
    best = min(means, key=lambda name: means[name])
    if len(means) == 1:
        return f"Only {best} reached the end of its training under every seed, at {lowest:.3f} nats"
    return f"The variants end within {highest - lowest:.3f} nats of one another; {best} ends lowest, at {lowest:.3f}"


def _ends_in_words(summary: Summary, what: str) -> str:
    ends = ", ".join(f"{v.name} {v.result.mean:.4f}" for v in summary.variants if v.result.mean is not None)
    return f"{what}. Means at the end, in nats: {ends or 'no numbers'}."


def _difference_in_words(summary: Summary) -> str:
    ends = ", ".join(
        f"{v.name} {v.result.difference:+.4f}" for v in summary.variants if v.result.difference is not None
    )
    return (
        f"Mean difference to {summary.plan.control} within seeds, at each evaluation; the bands are 95 percent "
        f"intervals for each point by itself. At the end, in nats: {ends or 'no numbers'}."
    )
