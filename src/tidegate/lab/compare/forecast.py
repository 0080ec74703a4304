"""Before the first run: how many runs there will be, how long they take, and what they can detect."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate._text import number_of
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.tuning import as_trial, num_trials
from tidegate.lab.judging import detectable_difference, seeds_needed
from tidegate.lab.judging.words import duration
from tidegate.lab.training.machine import num_cores
from tidegate.lab.training.records import Costs
from tidegate.lab.training.run import Run

TYPICAL_NOISE = 0.0065
"""Standard deviation between seeds of a variant's difference from the baseline on the standard task at its default
size, as a share of the baseline's loss."""
TUNED_NOISE = 0.031
"""The same if each seed selects its own settings, which adds selection noise: in the first arm on record."""
_FORWARD_SHARE = 1 / 3
"""Time of evaluating a token, relative to training on it."""
_SOUGHT = 0.01
"""The difference, as a share of the loss, for which seeds are counted."""


def forecast(request: Request, base: Mapping[str, Run], costs: Costs) -> str:
    """Return a few sentences on the number of runs, their time on this machine, and what they can detect.

    `base` has the first run of each variant, `costs` its training speed.
    """
    return f"{_work(request, base, costs)} {_power(request)}".rstrip()


def _work(request: Request, base: Mapping[str, Run], costs: Costs) -> str:
    trials = 0 if request.grid is None else num_trials(request.grid)
    compared = len(request.runs) or request.num_seeds * len(base)
    speeds = {cost.variant: cost.tokens_per_second for cost in costs.items}
    seconds = request.num_seeds * sum(
        (_equivalent_tokens(run) + trials * _equivalent_tokens(as_trial(run))) / speeds[name]
        for name, run in base.items()
    )
    tuned = f"{number_of(trials * request.num_seeds * len(base), 'tuning run')} and " if trials else ""
    return (
        f"This trains {tuned}{number_of(compared, 'comparison run')}, in about {duration(seconds / num_cores())} on "
        f"{number_of(num_cores(), 'core')}."
    )


def _equivalent_tokens(run: Run) -> float:
    """Return the number of training tokens that take as long as a run, evaluations included."""
    data, options = run.task.load(), run.training
    at_points, at_end = (sum(len(batch.inputs) for batch in batches) for batches in (data.validation(), data.final()))
    rows = options.steps * options.batch_size + _FORWARD_SHARE * (options.num_evaluations * at_points + at_end)
    return rows * run.task.length


def _power(request: Request) -> str:
    """Return the minimum detectable effect at the noise of the standard task; empty with too few seeds."""
    is_tuned = request.grid is not None and request.grid.chooses
    noise, number = TUNED_NOISE if is_tuned else TYPICAL_NOISE, len(request.variants) - 1
    detectable = detectable_difference(noise, num_blocks=request.num_seeds, num_comparisons=number)
    if request.runs or detectable is None:
        return ""
    needed = seeds_needed(noise, _SOUGHT, num_comparisons=number)
    task = "standard task with tuning" if is_tuned else "standard task"
    return (
        f"If differences from {request.control.name} have a standard deviation of {_percent(noise)} of the loss "
        f"between seeds, as on the {task}, the minimum detectable effect with {request.num_seeds} seeds is "
        f"{_percent(detectable)} (80 % power); detecting {_percent(_SOUGHT)} takes {needed or 'more than 1,000'} seeds."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
