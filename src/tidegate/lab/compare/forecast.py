"""Before the first run: how many runs there will be, how long they take, and what they can detect."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, stdev

from tidegate._text import number_of
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.compare.tuning import as_trial, num_trials
from tidegate.lab.judging import detectable_difference, seeds_needed
from tidegate.lab.training.machine import num_cores
from tidegate.lab.training.records import Costs
from tidegate.lab.training.run import Run

TYPICAL_NOISE = 0.0065
"""Standard deviation between seeds of a variant's difference to the baseline on the standard task at its default size,
as a share of the baseline's loss."""
TUNED_NOISE = 0.031
"""The same where each seed selects its own settings, which adds selection noise: in the first arm on record."""
_FORWARD_SHARE = 1 / 3
"""Time of a token that is only evaluated, relative to one that is trained on."""
_SOUGHT = 0.01
"""The difference, as a share of the loss, that seeds are counted for."""


def forecast(request: Request, base: Mapping[str, Run], costs: Costs) -> str:
    """Return a few sentences on the number of runs, their time on this machine, and what they can detect.

    Args:
        request: What to compare.
        base: The first run of each variant.
        costs: How fast each variant trains.
    """
    return f"{_work(request, base, costs)} {_power(request)}".rstrip()


def _work(request: Request, base: Mapping[str, Run], costs: Costs) -> str:
    trials = 0 if request.grid is None else num_trials(request.grid)
    compared = len(request.runs) or request.num_seeds * len(base)
    speeds = {cost.variant: cost.tokens_per_second for cost in costs.items}
    seconds = request.num_seeds * sum(
        (_worth_in_tokens(run) + trials * _worth_in_tokens(as_trial(run))) / speeds[name] for name, run in base.items()
    )
    cores = num_cores()
    hours, minutes = divmod(max(1, round(seconds / cores / 60)), 60)
    duration = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    tuned = f"{number_of(trials * request.num_seeds * len(base), 'run')} to tune and " if trials else ""
    return (
        f"This will train {tuned}{number_of(compared, 'run')} to compare, for about {duration} on "
        f"{number_of(cores, 'core')}."
    )


def _worth_in_tokens(run: Run) -> float:
    """Return the training tokens of a run and, in as many as take as long, those that it is evaluated on."""
    data, options = run.task.load(), run.training
    at_points, at_end = (sum(len(batch.inputs) for batch in batches) for batches in (data.validation(), data.final()))
    rows = options.steps * options.batch_size + _FORWARD_SHARE * (options.num_evaluations * at_points + at_end)
    return rows * run.task.length


def _power(request: Request) -> str:
    """Return the minimum detectable effect at the noise of the standard task; empty with too few seeds."""
    is_tuned = request.grid is not None and request.grid.chooses
    noise, number = TUNED_NOISE if is_tuned else TYPICAL_NOISE, len(request.variants) - 1
    shown = detectable_difference(noise, num_blocks=request.num_seeds, num_comparisons=number)
    if request.runs or shown is None:
        return ""
    return (
        f"If differences to {request.control.name} scatter by {_percent(noise)} of the loss from seed to seed, as on "
        f"the standard task{' when it was tuned' * is_tuned}, {request.num_seeds} seeds show one of "
        f"{_percent(shown)} at least 4 times in 5, and one of {_percent(_SOUGHT)} needs "
        f"{_seeds(noise, number)}."
    )


def seeds_for_a_verdict(summary: Summary) -> str:
    """Say how many seeds would tell the variants apart that were not; empty if there are none."""
    control, number = summary.control, len(summary.variants) - 1
    needs = [
        f"{variant.name} {_seeds(_scatter(variant, control), number)}"
        for variant in summary.variants
        if variant.result.verdict == "inconclusive"
    ]
    if not needs:
        return ""
    return (
        f"What would tell them apart? By the scatter of these runs a difference of {_percent(_SOUGHT)} is seen 4 times "
        f"in 5 with: {', '.join(needs)}."
    )


def _scatter(variant: VariantSummary, control: VariantSummary) -> float:
    """Return the deviation between seeds of a variant's difference to the control, as a share of its loss."""
    losses = [(own.loss, other.loss) for own, other in zip(variant.records, control.records, strict=True)]
    pairs = [(own, other) for own, other in losses if own is not None and other is not None]
    return stdev(own - other for own, other in pairs) / fmean(other for _, other in pairs)


def _seeds(noise: float, num_comparisons: int) -> str:
    needed = seeds_needed(noise, _SOUGHT, num_comparisons=num_comparisons)
    return "more than a thousand seeds" if needed is None else f"{needed} seeds"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
