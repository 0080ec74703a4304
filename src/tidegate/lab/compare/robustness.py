"""Trials at every learning rate and initialization: where verdicts hold, and each variant's learning-rate tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tidegate._verdict import Effect
from tidegate.lab.compare.summary import Summary, compare_with_placebos
from tidegate.lab.compare.tuning import choose_settings, rate_of, spell_value, start_of
from tidegate.lab.judging import Comparison, PlaceboResult, compare_to_control, effect_of, side_of_zero
from tidegate.lab.training.records import Plan, Record
from tidegate.report.page import CellValue, Column, Lines, Map, Maps, Panel, Prose, Section, Series, Table

_TOLERATED = 0.01
"""A rate is tolerated if its loss is at most this share above the best."""
_FEWEST_RATES = 3
"""With fewer rates, no tolerance is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapPoint:
    """The comparison at one point of the grid."""

    lr: float
    start: str
    comparison: Comparison
    placebos: Mapping[str, tuple[PlaceboResult, ...]]
    """By variant."""
    effects: Mapping[str, Effect]
    """By variant with a placebo."""


def robustness_map(plan: Plan, trials: Sequence[Record]) -> tuple[MapPoint, ...]:
    """Compare the variants at every point of the grid; return nothing unless every seed has a trial at every point.

    The intervals of a point are simultaneous for all variants, but not adjusted for the number of points: the map shows
    where a verdict changes and is not a verdict itself.
    """
    points: dict[tuple[str, float], dict[str, dict[int, Record]]] = {}
    for record in trials:
        own = points.setdefault((start_of(record), rate_of(record)), {}).setdefault(record.run.variant, {})
        own[record.run.block] = record
    if plan.grid is None or len(points) < len(plan.grid.rates) * len(plan.grid.starts):
        return ()
    wanted = {variant.name for variant in plan.variants}
    if any(set(own) != wanted or any(len(b) != plan.num_seeds for b in own.values()) for own in points.values()):
        return ()
    order = [spell_value(start) for start in plan.grid.starts]
    places = sorted(points, key=lambda place: (order.index(place[0]), place[1]))
    return tuple(_map_point(plan, *place, points[place]) for place in places)


def _map_point(plan: Plan, start: str, lr: float, records: Mapping[str, Mapping[int, Record]]) -> MapPoint:
    losses = {v.name: [records[v.name][block].loss for block in range(plan.num_seeds)] for v in plan.variants}
    comparison = compare_to_control(losses, control=plan.control, margin=plan.margin, unit="nats")
    placebos = compare_with_placebos(plan, losses, comparison)
    effects: dict[str, Effect] = {name: effect_of(comparison[name], own) for name, own in placebos.items() if own}
    return MapPoint(lr=lr, start=start, comparison=comparison, placebos=placebos, effects=effects)


def turning_sentence(points: Sequence[MapPoint], name: str) -> str:
    """Return a sentence on the settings at which a variant is significantly below and above the baseline."""
    found: dict[str, list[MapPoint]] = {}
    for point in points:
        result = point.comparison[name]
        side = side_of_zero(result.low, result.high)
        words = ("no significant difference", "significantly higher loss", "significantly lower loss")[side]
        found.setdefault("no verdict" if result.low is None else words, []).append(point)
    order = ("significantly lower loss", "significantly higher loss", "no significant difference", "no verdict")
    parts = [
        f"{words} at {len(found[words])} of {len(points)} settings{_places(found[words]) * ('loss' in words)}"
        for words in order
        if words in found
    ]
    return f"{name} compared with the baseline: {'; '.join(parts)}."


def _places(points: Sequence[MapPoint]) -> str:
    """List points by initialization and rate, as in " (init 0.02, rate 0.003 and 0.006)"."""
    by_start: dict[str, list[float]] = {}
    for point in points:
        by_start.setdefault(point.start, []).append(point.lr)
    listed = (f"init {start}, rate {' and '.join(f'{lr:g}' for lr in sorted(own))}" for start, own in by_start.items())
    return f" ({', '.join(listed)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """The learning-rate tolerance of one variant."""

    octaves: tuple[float | None, ...]
    """For each seed, the range in octaves of the rates that end within 1 % of the best; None if all diverged."""
    reaches_end: bool
    """Whether the range reaches an end of the grid under some seed, so that the tolerance may be larger."""
    diverged_at: float | None
    """The lowest rate at which a trial diverged; None if none did."""
    spikes: float | None
    """Mean number of loss spikes per trial; None if it is not on record."""


def tolerance_of(trials: Sequence[Record]) -> Tolerance:
    """Return the tolerance of one variant from its trials, for each seed at its best initialization."""
    blocks = sorted({record.run.block for record in trials})
    widths = [_tolerated_octaves([r for r in trials if r.run.block == block]) for block in blocks]
    spikes = [record.num_spikes for record in trials if record.num_spikes is not None]
    return Tolerance(
        octaves=tuple(width for width, _ in widths),
        reaches_end=any(at_end for _, at_end in widths),
        diverged_at=min((rate_of(record) for record in trials if record.status == "diverged"), default=None),
        spikes=sum(spikes) / len(spikes) if spikes else None,
    )


def _tolerated_octaves(trials: Sequence[Record]) -> tuple[float | None, bool]:
    """Return the range of tolerated rates around the best, interpolated linearly in the logarithm of the rate."""
    ended = [record for record in trials if record.loss is not None]
    if not ended:
        return None, False
    best = min(ended, key=lambda record: record.loss or math.inf)
    curve = sorted((math.log2(rate_of(r)), r.loss) for r in trials if start_of(r) == start_of(best))
    limit = (1 + _TOLERATED) * (best.loss or 0.0)
    centre = math.log2(rate_of(best))
    down, low_end = _reach([point for point in reversed(curve) if point[0] <= centre], limit)
    up, high_end = _reach([point for point in curve if point[0] >= centre], limit)
    return down + up, low_end or high_end


def _reach(curve: Sequence[tuple[float, float | None]], limit: float) -> tuple[float, bool]:
    """Return how far from its first point a curve stays below the limit, and whether it does so up to its last point.

    The loss of a diverged trial is unknown, so the range ends at the trial before it.
    """
    start, (place, loss) = curve[0][0], curve[0]
    for next_place, next_loss in curve[1:]:
        if next_loss is None:
            return abs(place - start), False
        if next_loss > limit:
            assert loss is not None
            share = (limit - loss) / (next_loss - loss)
            return abs(place + share * (next_place - place) - start), False
        place, loss = next_place, next_loss
    return abs(place - start), True


def rate_panels(summary: Summary) -> Iterator[Lines]:
    """Plot the loss of the trials against the learning rate, each seed at its best initialization."""
    if not summary.tuning:
        return
    best = {key: spell_value(setting.init) for key, setting in choose_settings(summary.tuning).items()}
    losses: dict[str, dict[float, list[float | None]]] = {}
    for record in sorted(summary.tuning, key=rate_of):
        if start_of(record) == best[record.run.variant, record.run.block]:
            losses.setdefault(record.run.variant, {}).setdefault(rate_of(record), []).append(record.loss)
    series = tuple(
        Series(label=v.name, group=v.name, x=tuple(own), y=tuple(map(_mean_if_complete, own.values())))
        for v in summary.variants
        if (own := losses.get(v.name))
    )
    lowest = {
        line.label: min(((y, x) for x, y in zip(line.x, line.y, strict=True) if y is not None), default=None)
        for line in series
    }
    words = ", ".join(f"{name} {point[0]:.4f} at {point[1]:g}" for name, point in lowest.items() if point is not None)
    yield Lines(
        title="Loss of the tuning trials by learning rate",
        alternative=f"Loss of the tuning trials by learning rate; lowest: {words or 'all runs diverged'}.",
        x_label="learning rate",
        y_label="loss (nats), mean over seeds at their best init; empty if a run diverged",
        series=series,
        log_x=True,
    )


def _mean_if_complete(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def robustness_section(summary: Summary) -> Section | None:
    """Return the section on where verdicts hold; None unless every seed has a trial at every point of the grid."""
    points = robustness_map(summary.plan, summary.tuning)
    if not points:
        return None
    others = [variant.name for variant in summary.plan.variants if variant.name != summary.plan.control]
    return Section(
        title="Robustness to learning rate and initialization",
        lead="Every variant at every learning rate and initialization. Each setting is compared individually over "
        f"{summary.plan.num_seeds} seeds; its intervals are simultaneous for all variants, but not adjusted for "
        f"{len(points)} settings.",
        panels=(
            Prose(paragraphs=tuple(turning_sentence(points, name) for name in others)),
            _maps(points, others),
            _table(points, others),
            *_tolerance_panels(summary),
        ),
    )


def _maps(points: Sequence[MapPoint], others: Sequence[str]) -> Maps:
    starts = list(dict.fromkeys(point.start for point in points))
    rates = sorted({point.lr for point in points})
    by_place = {(point.start, point.lr): point.comparison for point in points}
    maps = tuple(
        Map(label=name, values=tuple(tuple(by_place[s, rate][name].difference for rate in rates) for s in starts))
        for name in others
    )
    what = "Difference from the baseline by initialization and learning rate"
    words = "; ".join(f"{map_.label} {_range(map_)}" for map_ in maps)
    return Maps(
        title=f"{what}: negative is better",
        alternative=f"{what}, in nats: {words}.",
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
    """Return the intervals at every point."""
    control = points[0].comparison.control
    return Table(
        title="Intervals at every setting",
        columns=(
            Column(title="variant"),
            Column(title="init"),
            Column(title="rate"),
            Column(title="verdict", help=f"Against {control}, at this setting only."),
            *map(_in_nats, ("difference", "low", "high")),
            Column(title="placebo"),
            *map(_in_nats, ("from placebo", "placebo low", "placebo high")),
            Column(title="mechanism", help="Effect against the baseline and every placebo."),
        ),
        rows=tuple(row for name in others for point in points for row in _rows(point, name)),
    )


def _in_nats(title: str) -> Column:
    return Column(title=title, unit="nats", digits=4, signed=True)


def _rows(point: MapPoint, name: str) -> Iterator[tuple[CellValue, ...]]:
    """Yield a row for each placebo of a variant, or a single row without a placebo."""
    result = point.comparison[name]
    own = (name, point.start, f"{point.lr:g}", result.verdict, result.difference, result.low, result.high)
    effect = point.effects.get(name)
    for placebo in point.placebos[name] or (None,):
        against = (None, None, None, None)
        if placebo is not None:
            against = (placebo.placebo, placebo.difference, placebo.low, placebo.high)
        yield (*own, *against, effect)


def _tolerance_panels(summary: Summary) -> Iterator[Panel]:
    """Yield the table of the variants' learning-rate tolerances; nothing with fewer than three rates."""
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
        title="Learning-rate tolerance",
        columns=(
            Column(title="variant"),
            Column(
                title="tolerated",
                unit="octaves",
                digits=2,
                help=f"Range of rates that end within {_TOLERATED:.0%} of the best, at each seed's best init.",
            ),
            Column(
                title="difference", unit="octaves", digits=2, signed=True, help="From the baseline, paired by seed."
            ),
            Column(title="from", digits=2, signed=True),
            Column(title="to", digits=2, signed=True),
            Column(title="reaches an end", help="Of the grid: the tolerance may be larger."),
            Column(title="diverges at", help="Lowest rate at which a trial diverged; empty if none did."),
            Column(title="loss spikes", digits=2, help="Mean number of steps per trial."),
        ),
        rows=tuple(_tolerance_row(name, own, judged) for name, own in found.items()),
        note="Intervals are simultaneous for all variants. The loss is interpolated linearly in the logarithm of the "
        "rate.",
    )


def _tolerance_row(name: str, own: Tolerance, judged: Comparison) -> tuple[CellValue, ...]:
    result = judged[name]
    known = [width for width in own.octaves if width is not None]
    diverged = None if own.diverged_at is None else f"{own.diverged_at:g}"
    mean = fmean(known) if known else None
    end = "yes" if own.reaches_end else "no"
    return (name, mean, result.difference, result.low, result.high, end, diverged, own.spikes)
