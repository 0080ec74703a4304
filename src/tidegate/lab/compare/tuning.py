"""Tuning inside the blocks of a comparison: which settings are tried, and which is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tidegate.config import Init
from tidegate.lab.training.records import Grid, Record
from tidegate.lab.training.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of the grid that every variant is tuned over."""

    lr: float
    init: Init

    def given_to(self, run: Run) -> Run:
        """The same run with these in place of its own."""
        return replace(run, model=replace(run.model, init=self.init), training=replace(run.training, lr=self.lr))


_FIRST_TUNING_SEED = 1_000_000
"""Seeds of tuning begin here, or after those of the comparison if they reach as far."""


def next_trials(base: Mapping[str, Run], grid: Grid, *, num_seeds: int, done: Sequence[Record]) -> list[Run]:
    """The trials of every variant in each block that can be made now; none once all are done.

    All are of full length, on a seed of the block's own. Each block chooses for itself, so that the luck of choosing
    differs between blocks and widens the intervals. One choice for all blocks would be a difference between variants
    that no number of seeds could tell from an effect.

    base      : the first run of each variant
    num_seeds : how many the comparison takes, from the first run's on
    done      : the records of all earlier trials
    """
    first = num_seeds + max(_FIRST_TUNING_SEED, *(run.seed for run in base.values()))
    best = choose_settings(done)
    wanted = [
        replace(
            Setting(lr=run.training.lr * rate, init=cast("Init", start)).given_to(as_trial(run)),
            block=block,
            seed=first + block,
        )
        for block in range(num_seeds)
        for start in grid.starts
        for rate in grid.rates
        for name, run in base.items()
        if _is_tried(start, rate, grid, best.get((name, block)))
    ]
    known = {record.id for record in done}
    return [run for run in wanted if run.id not in known]


def as_trial(run: Run) -> Run:
    """The same run as one that only tunes: looked at once, at its end."""
    return replace(run, role="tuning", training=replace(run.training, num_evaluations=1, num_observations=1))


def _is_tried(start: float | str, rate: float, grid: Grid, best: Setting | None) -> bool:
    """Whether a point of the grid is tried, by what is known so far to be the best."""
    if grid.search == "grid" or rate == grid.middle:
        return True
    return best is not None and best.init == start


def choose_settings(records: Iterable[Record]) -> dict[tuple[str, int], Setting]:
    """Choose for each variant in each block the setting of the lowest loss, of those at which no run diverged.

    A variant that diverged at every one gets the lowest rate: that it diverges is for the comparison to show.
    """
    tried: dict[tuple[str, int], list[tuple[float, float, Init]]] = {}
    for record in records:
        loss = math.inf if record.loss is None else record.loss
        key = record.run.variant, record.run.block
        tried.setdefault(key, []).append((loss, record.run.training.lr, record.run.model.init))
    best = {key: min(points, key=lambda point: point[:2]) for key, points in tried.items()}
    return {key: Setting(lr=lr, init=init) for key, (_, lr, init) in best.items()}


def rate_of(record: Record) -> float:
    """The learning rate of a run."""
    return record.run.training.lr


def start_of(record: Record) -> str:
    """Return how the weights of a run started."""
    return spell_value(record.run.model.init)


def spell_value(value: float | str) -> str:
    """The value of an option as words and tables have it."""
    return value if isinstance(value, str) else f"{value:g}"
