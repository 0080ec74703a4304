"""Choosing each variant's learning rate: one grid, a short budget, seeds that the comparison does not use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tidegate.lab.training.records import Record
from tidegate.lab.training.run import Run

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of a variant's own learning rate."""

_SHARE = 0.2
"""Of a run's steps."""
_NUM_SEEDS = 2
_FAR = 1_000_000
"""Tuning seeds begin beyond this, and beyond those of the comparison."""


def tuning_runs(base: Mapping[str, Run], *, num_seeds: int) -> list[Run]:
    """Short runs of every variant over the grid.

    base      : the first run of each variant
    num_seeds : how many the comparison takes, from the first run's on
    """
    first = num_seeds + max(_FAR, *(run.seed for run in base.values()))
    return [
        replace(
            run,
            block=trial,
            seed=first + trial,
            role="tuning",
            training=replace(
                run.training,
                lr=run.training.lr * multiple,
                steps=max(1, round(_SHARE * run.training.steps)),
                num_evaluations=1,
                num_observations=1,
            ),
        )
        for trial in range(_NUM_SEEDS)
        for run in base.values()
        for multiple in GRID
    ]


def chosen_rates(records: Iterable[Record]) -> dict[str, float]:
    """For each variant the learning rate of the lowest mean loss, one at which no run diverged.

    A variant that diverged at every rate gets the lowest: that it diverges is for the comparison to show.
    """
    losses: dict[str, dict[float, list[float]]] = {}
    for record in records:
        rate = record.run["training"]["lr"]
        loss = math.inf if record.loss is None else record.loss
        losses.setdefault(record.run["variant"], {}).setdefault(rate, []).append(loss)
    chosen: dict[str, float] = {}
    for variant, by_rate in losses.items():
        chosen[variant] = min(sorted(by_rate), key=lambda rate: sum(by_rate[rate]))
    return chosen
