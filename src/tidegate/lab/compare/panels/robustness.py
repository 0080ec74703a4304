"""The map of where verdicts hold, and how much of the learning rate each variant tolerates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np

from tidegate.lab.compare.robustness import (
    TOLERATED,
    MapPoint,
    Tolerance,
    robustness_map,
    tolerance_of,
    trial_losses,
    turning_sentence,
)
from tidegate.lab.compare.summary import Summary
from tidegate.lab.judging import Comparison, calibrate, compare_to_control
from tidegate.report.page import CellValue, Column, Map, Maps, Panel, Prose, Section, Table, View, Views

_Figure: TypeAlias = Callable[[MapPoint], float | None]
"""What a map shows of a point."""
_FEWEST_RATES = 3
_BLOCKS_DRAWN = 5
"""Of the comparisons that a calibration draws."""


def robustness_section(summary: Summary) -> Section | None:
    """Show where verdicts hold; None unless every block tried every point of a grid."""
    points = robustness_map(summary.plan, summary.tuning)
    if not points:
        return None
    others = [variant.name for variant in summary.plan.variants if variant.name != summary.plan.control]
    return Section(
        title="Where the verdict holds",
        lead="Every variant at every learning rate and start of the weights. Each setting is judged by itself, by its "
        f"{summary.plan.num_seeds} blocks; its intervals hold for all variants at once, and are not adjusted for "
        f"{len(points)} settings.",
        panels=(
            Prose(paragraphs=tuple(turning_sentence(points, name) for name in others)),
            Views(title="Differences by rate and start", views=tuple(_views(points, others))),
            _table(points, others),
            *_tolerance_panels(summary),
            *_calibration_panels(summary, points),
        ),
    )


def _views(points: Sequence[MapPoint], others: Sequence[str]) -> Iterator[View]:
    control = points[0].comparison.control
    figures: dict[str, _Figure] = {name: _difference_to_control(name) for name in others}
    yield View(label=f"to {control}", panel=_maps(points, figures, f"to {control}"))
    named: dict[str, _Figure] = {
        f"{name} − {placebo.placebo}": _difference_to_placebo(name, place)
        for name in others
        for place, placebo in enumerate(points[0].placebos[name])
        if placebo.placebo != control
    }
    if named:
        yield View(label="to placebos", panel=_maps(points, named, "to its placebo"))


def _difference_to_control(name: str) -> _Figure:
    return lambda point: point.comparison[name].difference


def _difference_to_placebo(name: str, place: int) -> _Figure:
    return lambda point: point.placebos[name][place].difference


def _maps(points: Sequence[MapPoint], figures: Mapping[str, _Figure], what: str) -> Maps:
    starts = list(dict.fromkeys(point.start for point in points))
    rates = sorted({point.lr for point in points})
    by_place = {(point.start, point.lr): point for point in points}
    maps = tuple(
        Map(label=label, values=tuple(tuple(figure(by_place[start, rate]) for rate in rates) for start in starts))
        for label, figure in figures.items()
    )
    words = "; ".join(f"{map_.label} {_range(map_)}" for map_ in maps)
    return Maps(
        title=f"Difference {what}; a negative one is a lower loss",
        alternative=f"Difference in held-out loss {what} by start of the weights and learning rate: {words}.",
        row_label="init",
        column_label="rate",
        value_label="difference (nats)",
        maps=maps,
        row_names=tuple(starts),
        column_names=tuple(f"{rate:g}" for rate in rates),
        diverging=True,
    )


def _range(map_: Map) -> str:
    known = [value for row in map_.values for value in row if value is not None]
    return f"from {min(known):+.4f} to {max(known):+.4f}" if known else "diverged everywhere"


def _table(points: Sequence[MapPoint], others: Sequence[str]) -> Table:
    """Every point with its intervals."""
    control = points[0].comparison.control
    return Table(
        title="Every setting with its intervals",
        columns=(
            Column(title="variant"),
            Column(title="init"),
            Column(title="rate"),
            Column(title="verdict", help=f"Against {control}, at this setting alone."),
            *map(_in_nats, ("difference", "from", "to")),
            Column(title="placebo"),
            *map(_in_nats, ("to placebo", "placebo from", "placebo to")),
            Column(title="its gate", help="Against the control and against every placebo."),
        ),
        rows=tuple(row for name in others for point in points for row in _rows(point, name)),
    )


def _in_nats(title: str) -> Column:
    return Column(title=title, unit="nats", digits=4, signed=True)


def _rows(point: MapPoint, name: str) -> Iterator[tuple[CellValue, ...]]:
    """A row for each placebo of a variant, one if it has none."""
    result = point.comparison[name]
    own = (name, point.start, f"{point.lr:g}", result.verdict, result.difference, result.low, result.high)
    effect = point.effects.get(name)
    for placebo in point.placebos[name] or (None,):
        against = (None, None, None, None)
        if placebo is not None:
            against = (placebo.placebo, placebo.difference, placebo.low, placebo.high)
        yield (*own, *against, effect)


def _tolerance_panels(summary: Summary) -> Iterator[Panel]:
    """How much of the learning rate each variant tolerates; nothing of fewer than three rates."""
    plan = summary.plan
    if plan.grid is None or len(plan.grid.rates) < _FEWEST_RATES:
        return
    found = {
        variant.name: tolerance_of([record for record in summary.tuning if record.run.variant == variant.name])
        for variant in plan.variants
    }
    judged = compare_to_control(
        {name: own.octaves for name, own in found.items()},
        control=plan.control,
        margin=0.0,
        lower_is_better=False,
        unit="octaves",
    )
    yield Table(
        title="How much of the learning rate is tolerated",
        columns=(
            Column(title="variant"),
            Column(
                title="tolerated",
                unit="octaves",
                digits=2,
                help=f"Width of the rates that end within {TOLERATED:.0%} of the best, at a block's best start.",
            ),
            Column(title="difference", unit="octaves", digits=2, signed=True, help="To the control, within blocks."),
            Column(title="from", digits=2, signed=True),
            Column(title="to", digits=2, signed=True),
            Column(title="reaches an end", help="Whether more may be tolerated than the grid has."),
            Column(title="diverged from", help="The lowest rate at which a trial diverged; empty if none did."),
            Column(title="spikes", digits=2, help="Steps of a trial whose loss leapt up, on average."),
        ),
        rows=tuple(_tolerance_row(name, own, judged) for name, own in found.items()),
        note="Intervals hold for all variants at once. Between two rates the loss is taken along a line in the "
        "logarithm of the rate.",
    )


def _calibration_panels(summary: Summary, points: Sequence[MapPoint]) -> Iterator[Panel]:
    """How often the whole procedure is wrong on runs like these; nothing of too few blocks, or if a trial diverged."""
    losses = trial_losses(points, summary.tuning)
    if losses is None or summary.plan.num_seeds < 2 * _BLOCKS_DRAWN:
        return
    rows: list[tuple[CellValue, ...]] = []
    for how, flip in (("as they are", False), ("signs flipped by chance", True)):
        found = calibrate(np.array(losses), num_blocks=_BLOCKS_DRAWN, flip_signs=flip)
        rows.append(
            (how, found.num_comparisons, *(100 * s for s in (found.alarm_rate, found.alarm_limit, found.power)))
        )
    yield Table(
        title="How often the procedure is wrong, tuning included",
        columns=(
            Column(title="deviations of runs"),
            Column(title="comparisons", help="Drawn from these trials, without a difference between variants."),
            Column(title="false alarms", unit="%", digits=2, help="Comparisons in which an interval excludes 0."),
            Column(title="at most", unit="%", digits=2, help="Upper limit of that rate, with 95 % confidence."),
            Column(title="1 % seen", unit="%", digits=1, help="How often a difference of 1 % of the loss is seen."),
        ),
        rows=tuple(rows),
        note=f"Each comparison draws {_BLOCKS_DRAWN} blocks to tune on and {_BLOCKS_DRAWN} to compare on from the "
        f"{summary.plan.num_seeds} here; what variants differ by on average is taken out at each setting. Deviations "
        "from a mean of few runs add up to 0, which makes alarms rarer; flipped ones do not.",
    )


def _tolerance_row(name: str, own: Tolerance, judged: Comparison) -> tuple[CellValue, ...]:
    result = judged[name]
    known = [width for width in own.octaves if width is not None]
    diverged = None if own.diverged_at is None else f"{own.diverged_at:g}"
    mean = fmean(known) if known else None
    end = "yes" if own.reaches_end else "no"
    return (name, mean, result.difference, result.low, result.high, end, diverged, own.spikes)
