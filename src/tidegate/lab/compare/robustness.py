"""Where a verdict holds: every variant against the control and its placebos at each learning rate and start.

Read off the trials of a comparison in which every block tried every point of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate._verdict import Effect
from tidegate.lab.compare.tuning import rate_of, spell_value, start_of
from tidegate.lab.compare.variants import placebos_of
from tidegate.lab.judging import Comparison, PlaceboResult, compare_to_control, effect_of, judge_placebo, side_of_zero
from tidegate.lab.training.records import Plan, Record

TOLERATED = 0.01
"""Share of the best loss by which a tolerated rate may lie above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapPoint:
    """One point of the grid, judged like a comparison of its own."""

    lr: float
    start: str
    comparison: Comparison
    placebos: Mapping[str, tuple[PlaceboResult, ...]]
    """By variant."""
    effects: Mapping[str, Effect]
    """By variant that has a placebo."""


def robustness_map(plan: Plan, trials: Sequence[Record]) -> tuple[MapPoint, ...]:
    """Judge every point of the grid, start by start; nothing unless every block tried every one of them.

    The intervals of a point hold for all variants at once. They are not adjusted for the number of points: the map
    shows where a verdict turns, and is no verdict itself.
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
    return tuple(_judge_point(plan, *place, points[place]) for place in places)


def trial_losses(points: Sequence[MapPoint], trials: Sequence[Record]) -> list[list[list[float]]] | None:
    """The losses of all trials by variant, setting and block, the control first; None if one of them diverged."""
    if not points:
        return None
    names = [result.name for result in points[0].comparison.variants]
    names.sort(key=lambda name: name != points[0].comparison.control)
    found = {(r.run.variant, start_of(r), rate_of(r), r.run.block): r.loss for r in trials}
    blocks = range(points[0].comparison.num_blocks)
    losses = [[[found[name, p.start, p.lr, block] for block in blocks] for p in points] for name in names]
    known = [[[loss for loss in row if loss is not None] for row in own] for own in losses]
    return known if known == losses else None


def _judge_point(plan: Plan, start: str, lr: float, records: Mapping[str, Mapping[int, Record]]) -> MapPoint:
    losses = {v.name: [records[v.name][block].loss for block in range(plan.num_seeds)] for v in plan.variants}
    comparison = compare_to_control(losses, control=plan.control, margin=plan.margin, unit="nats")
    placebos = {
        variant.name: tuple(
            judge_placebo(losses[variant.name], losses[name], name=name, confidence=comparison.confidence)
            for name in placebos_of(variant, plan.variants, control=plan.control)
        )
        for variant in plan.variants
    }
    effects: dict[str, Effect] = {name: effect_of(comparison[name], own) for name, own in placebos.items() if own}
    return MapPoint(lr=lr, start=start, comparison=comparison, placebos=placebos, effects=effects)


def turning_sentence(points: Sequence[MapPoint], name: str) -> str:
    """Say where on the map a variant is better than the control and where worse: where its verdict turns."""
    better = [point for point in points if _sign(point, name) < 0]
    worse = [point for point in points if _sign(point, name) > 0]
    control, number = points[0].comparison.control, len(points)
    if better and worse:
        return (
            f"{name}: the verdict turns. It is below {control} at {_places(better)}, and above it at {_places(worse)}; "
            f"{number - len(better) - len(worse)} of {number} settings do not tell them apart."
        )
    if better or worse:
        side, found, other = ("below", better, "above") if better else ("above", worse, "below")
        return (
            f"{name} is {side} {control} at {_places(found)}, and nowhere {other} it; "
            f"{number - len(found)} of {number} settings do not tell them apart."
        )
    return f"{name} is told apart from {control} at none of {number} settings."


def _sign(point: MapPoint, name: str) -> int:
    result = point.comparison[name]
    return side_of_zero(result.low, result.high)


def _places(points: Sequence[MapPoint]) -> str:
    """Name points by their starts and rates: "init 0.02 with 0.003, 0.006"."""
    by_start: dict[str, list[float]] = {}
    for point in points:
        by_start.setdefault(point.start, []).append(point.lr)
    return "; ".join(
        f"init {start} with {', '.join(f'{lr:g}' for lr in sorted(rates))}" for start, rates in by_start.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How much the learning rate matters to one variant."""

    octaves: tuple[float | None, ...]
    """In each block, the width in octaves of the rates that end within 1 % of the best; None if every rate diverged."""
    reaches_end: bool
    """Whether the tolerated rates reach an end of the grid in some block, so that more may be tolerated."""
    diverged_at: float | None
    """The lowest rate at which a trial diverged; None if none did."""
    spikes: float | None
    """Steps of a trial whose loss leapt up, on average; None where that is not on record."""


def tolerance_of(trials: Sequence[Record]) -> Tolerance:
    """Measure the tolerance of one variant from its trials, in each block at its best start there."""
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
    """The width of the tolerated rates around the best, between trials along a line in the logarithm of the rate."""
    ended = [record for record in trials if record.loss is not None]
    if not ended:
        return None, False
    best = min(ended, key=lambda record: record.loss or math.inf)
    curve = sorted((math.log2(rate_of(r)), r.loss) for r in trials if start_of(r) == start_of(best))
    limit = (1 + TOLERATED) * (best.loss or 0.0)
    centre = math.log2(rate_of(best))
    down, low_end = _reach([point for point in reversed(curve) if point[0] <= centre], limit)
    up, high_end = _reach([point for point in curve if point[0] >= centre], limit)
    return down + up, low_end or high_end


def _reach(curve: Sequence[tuple[float, float | None]], limit: float) -> tuple[float, bool]:
    """How far from its first point a curve stays below the limit, and whether it does so to its last point.

    A trial that diverged is above any limit, and where between it and its neighbour the limit lies is not known: the
    reach ends at the neighbour.
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
