"""What is asked for: variants to compare on a task, at a size, over seeds, and the grid to tune them over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate._text import echo
from tidegate.lab.compare.presets import PresetName
from tidegate.lab.compare.settings import TunedSettings
from tidegate.lab.compare.variants import Variant, parse_option
from tidegate.lab.judging import MARGIN
from tidegate.lab.tasks.task import Task
from tidegate.lab.training.machine import require_device
from tidegate.lab.training.records import Grid, Match, Search
from tidegate.lab.training.run import Run

_MOST_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to compare."""

    variants: tuple[Variant, ...]
    """The first is the control."""
    task: Task
    preset: PresetName = "tiny"
    num_seeds: int = 5
    budget: int | None = None
    """Tokens, or images, that the control is trained on; None takes the preset's."""
    match: Match = "tokens"
    grid: Grid | None = None
    """Tune every variant over this, inside each block; None tunes nothing."""
    settings: TunedSettings | None = None
    """Learning rates and starts that were tuned before; None takes the preset's."""
    device: str = "cpu"
    """Where models are trained, as PyTorch names it."""
    margin: float = MARGIN
    """Differences below this share of the control's loss do not matter."""
    command: str = ""
    """What to type to get this again."""
    runs: tuple[Run, ...] = ()
    """Runs that were made elsewhere; they take the place of all that the request would make."""

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ValueError(f"num_seeds must be at least 1; got {self.num_seeds}. Three are needed for a verdict.")
        if self.num_seeds > _MOST_SEEDS:
            raise ValueError(f"num_seeds must be at most {_MOST_SEEDS:,}; got {self.num_seeds}.")
        if self.budget is not None and not 1 <= self.budget < 2**63:
            raise ValueError(f"budget must be at least 1 and fit into 64 bits; got {self.budget}.")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin must be a finite number of at least 0; got {self.margin}.")
        if len(self.variants) < 2:
            raise ValueError(f"variants must be at least two, the control first; got {len(self.variants)}.")
        if self.grid is not None and self.settings is not None:
            raise ValueError(
                "settings were tuned before, and --tune and --map try the same points for all. Leave one out."
            )
        if self.settings is not None and not self.settings.fits(self.task, self.preset):
            facts = ", ".join(f"{name} {value}" for name, value in self.settings.task.items())
            raise ValueError(
                f"settings of {self.settings.source} were tuned on other data or for another size: preset "
                f"{self.settings.preset}, {facts}. Tune anew with --tune, or leave --settings out."
            )
        if self.grid is not None and (own := [v.name for v in self.variants if {"lr", "init"} & set(v.options)]):
            raise ValueError(
                f"--tune and --map give all variants the same rates and starts; lr or init is set for "
                f"{', '.join(own)}. Leave it out there, or leave --tune and --map out."
            )
        _require_widths(self.variants, self.match)
        _require_design(self.runs)
        require_device(self.device)

    @property
    def control(self) -> Variant:
        """What the others are compared with."""
        return self.variants[0]


def grid_of(rates: str | None, starts: str | None, *, search: Search, chooses: bool) -> Grid:
    """The grid that the command line describes.

    rates  : multiples of the learning rate, parted by commas; None takes the usual three
    starts : values of `init`, parted by commas; None takes the usual three
    """
    return Grid(
        rates=GRID.rates if rates is None else _parse_rates(rates),
        starts=GRID.starts if starts is None else _parse_starts(starts),
        search=search,
        chooses=chooses,
    )


def _parse_starts(starts: str) -> tuple[float | str, ...]:
    try:
        found = tuple(parse_option(f"init={start}", starts)[1] for start in starts.split(","))
    except ValueError:
        found = ()
    if not found or not all(isinstance(start, str) or start > 0 for start in found) or len(set(found)) < len(found):
        raise ValueError(
            "starts must be different ones, each fan-in, torch or a standard deviation above 0, such as "
            f"0.02,fan-in,torch; got {echo(starts)}."
        )
    return found


def _parse_rates(rates: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(rate) for rate in rates.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < rate < math.inf for rate in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"rates must be different numbers above 0, such as 0.5,1,2; got {echo(rates)}.")
    return tuple(sorted(numbers))


GRID = Grid(rates=(0.5, 1.0, 2.0), starts=(0.02, "fan-in", "torch"))
"""What `--tune` tries."""


def _require_widths(variants: Sequence[Variant], match: Match) -> None:
    """Refuse a variant that is to have the parameters of none that keeps its own."""
    for variant in variants:
        if variant.params is None:
            continue
        if match == "params":
            raise ValueError(
                f"--match params gives all variants the control's number of parameters, and {variant.name} asks for "
                f"that of {echo(variant.params)}. Leave one of them out."
            )
        if variant.params not in (other.name for other in variants if other.params is None):
            raise ValueError(
                f"params of the variant {variant.name} must name another variant, one without params, whose number of "
                f"parameters it is to have; got {echo(variant.params)}."
            )


def _require_design(runs: Sequence[Run]) -> None:
    """Refuse given runs unless there is one of each variant in each block, all of one task."""
    blocks: dict[str, list[int]] = {}
    for run in runs:
        blocks.setdefault(run.variant, []).append(run.block)
    if any(sorted(own) != list(range(len(runs) // len(blocks))) for own in blocks.values()):
        raise ValueError(f"Given runs are one of each variant in each block, blocks counted from 0; got {blocks}.")
    if len({run.task for run in runs}) > 1 or any(run.role != "comparison" for run in runs):
        raise ValueError("Given runs are of one task, and all have the role 'comparison'.")
