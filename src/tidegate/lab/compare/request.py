"""The request: variants, task, size, seeds, and the grid for tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate._validation import InputError
from tidegate.lab.compare.presets import PresetName
from tidegate.lab.compare.tuning import TunedSettings
from tidegate.lab.judging import MARGIN
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.machine import require_device
from tidegate.lab.training.records import Grid, Match, Search, Variant
from tidegate.lab.training.run import Run

_MOST_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The options of a comparison."""

    variants: tuple[Variant, ...]
    """The first is the baseline."""
    task: Task
    preset: PresetName = "tiny"
    num_seeds: int = 5
    budget: int | None = None
    """Training tokens, or images, of the baseline; None takes the preset's."""
    match: Match = "tokens"
    grid: Grid | None = None
    """Tune every variant over this grid, for each seed; None does not tune."""
    settings: TunedSettings | None = None
    """Previously tuned learning rates and initializations; None takes the preset's."""
    device: str = "cpu"
    """PyTorch device for training."""
    margin: float = MARGIN
    """Differences below this share of the baseline's loss are irrelevant."""
    command: str = ""
    """The command that repeats the comparison."""
    runs: tuple[Run, ...] = ()
    """Given runs, which replace all runs of the request."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_seeds <= _MOST_SEEDS:
            hint = "A verdict needs at least 3."
            raise InputError("num_seeds", expected=f"between 1 and {_MOST_SEEDS:,}", got=self.num_seeds, hint=hint)
        if self.budget is not None and not 1 <= self.budget < 2**63:
            raise InputError("budget", expected="at least 1 and below 2^63", got=self.budget)
        if not 0 <= self.margin < math.inf:
            raise InputError("margin", expected="a finite number of at least 0", got=self.margin)
        if len(self.variants) < 2:
            raise InputError("variants", expected="at least two, the baseline first", got=len(self.variants))
        _check_tuning(self)
        _check_widths(self.variants, self.match)
        _check_runs(self.runs)
        require_device(self.device)

    @property
    def control(self) -> Variant:
        """The baseline."""
        return self.variants[0]


GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "fan-in", "torch"))
"""The default grid."""


def parse_grid(rates: str | None, starts: str | None, *, search: Search, chooses: bool) -> Grid:
    """Return the grid of comma-separated multiples of the learning rate and values of `init`.

    None takes the default three. The other arguments are those of `Grid`.
    """
    numbers = GRID.rates if rates is None else _parse_list("rates", rates, "different numbers above 0, such as 0.5,1,2")
    expected = "different ones of fan-in, torch and standard deviations above 0, such as 0.02,fan-in,torch"
    names = GRID.starts if starts is None else _parse_list("starts", starts, expected, "fan-in", "torch")
    return Grid(rates=tuple(sorted(numbers)), starts=tuple(names), search=search, chooses=chooses)


def _parse_list(field: str, text: str, expected: str, *words: str) -> Sequence[Any]:
    """Return comma-separated words and numbers above 0, all different."""
    values = [part if part in words else _positive(part) for part in map(str.strip, text.split(","))]
    if None in values or len(set(values)) < len(values):
        raise InputError(field, expected=expected, got=text)
    return values


def _positive(text: str) -> float | None:
    """Return the text as a finite number above 0; None if it is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _check_tuning(request: Request) -> None:
    settings, grid = request.settings, request.grid
    if grid is not None and settings is not None:
        raise InputError("settings", expected="None with a grid", hint="Leave settings or the grid out.")
    if settings is not None and not settings.fits(request.task, request.preset):
        facts = ", ".join(f"{name} {value}" for name, value in settings.task.items())
        got = f"{settings.source}: preset {settings.preset}, {facts}"
        hint = "Tune on this data, or leave settings out."
        raise InputError("settings", expected="tuned on the same data for the same preset", got=got, hint=hint)
    if grid is not None and (own := [v.name for v in request.variants if {"lr", "init"} & set(v.overrides)]):
        hint = "Leave lr and init out there, or leave the grid out."
        raise InputError("variants", expected="without lr and init with a grid", got=", ".join(own), hint=hint)


def _check_widths(variants: Sequence[Variant], match: Match) -> None:
    """Raise InputError unless `params` names a variant that keeps its own number of parameters."""
    keeping = [variant.name for variant in variants if "params" not in variant.overrides]
    for variant in variants:
        wanted = variant.overrides.get("params")
        if wanted is not None and match == "params":
            hint = f"Leave params of {variant.name} out, or choose another match."
            raise InputError("variants", expected="without params if match is 'params'", got=wanted, hint=hint)
        if wanted is not None and wanted not in keeping:
            expected = f"given a variant without params as params of {variant.name}"
            raise InputError("variants", expected=expected, got=wanted)


def _check_runs(runs: Sequence[Run]) -> None:
    """Raise InputError unless there is one run of each variant in each block, all on the same task."""
    blocks: dict[str, list[int]] = {}
    for run in runs:
        blocks.setdefault(run.variant, []).append(run.block)
    if any(sorted(own) != list(range(len(runs) // len(blocks))) for own in blocks.values()):
        raise InputError("runs", expected="one of each variant in each block, counted from 0", got=blocks)
    if len({run.task for run in runs}) > 1 or any(run.role != "comparison" for run in runs):
        raise InputError("runs", expected="on one task and of the role 'comparison'")
