"""Before the runs: how many there will be, how long they take, and what they can show. After them: what more would."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, stdev

from tidegate._text import number_of
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.summary import Summary, VariantSummary
from tidegate.lab.compare.tuning import as_trial
from tidegate.lab.judging import detectable_difference, seeds_needed
from tidegate.lab.training.machine import num_cores
from tidegate.lab.training.records import Costs, Grid
from tidegate.lab.training.run import Run

TYPICAL_NOISE = 0.0065
"""Standard deviation between seeds of a variant's difference to the control on the standard task at its default size,
as a share of the control's loss: assumed where nothing is known."""
TUNED_NOISE = 0.031
"""The same where each block chooses its own settings, which adds the luck of choosing: in the first arm on record."""
_FORWARD_SHARE = 1 / 3
"""Time of a token that is only evaluated, of one that is trained on: the backward pass costs two forward passes."""
_SOUGHT = 0.01
"""The difference, as a share of the loss, that seeds are counted for."""


def forecast(request: Request, base: Mapping[str, Run], costs: Costs) -> str:
    """Say in a few sentences what is about to be done, how long it takes here, and what it can show.

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
    """Say which difference each variant's runs will show; nothing for given runs, or with too few seeds for a verdict.

    Judged by each variant's own pairs: equal spreads would show smaller ones, but nobody knows before that they are.
    """
    is_tuned = request.grid is not None and request.grid.chooses
    typical = TUNED_NOISE if is_tuned else TYPICAL_NOISE
    noises: dict[str, float] = {}
    for variant in request.variants[1:]:
        known = None if request.settings is None else request.settings.noise_of(variant)
        noises[variant.name] = typical if known is None else known
    number = len(noises)
    shown = {
        name: detectable_difference(noise, num_blocks=request.num_seeds, num_comparisons=number, pooled=False)
        for name, noise in noises.items()
    }
    if request.runs or None in shown.values():
        return ""
    sought, seeds, control = _percent(_SOUGHT), f"{request.num_seeds} seeds", request.control.name
    needed = {name: _seeds(noise, number, pooled=False) for name, noise in noises.items()}
    if len(set(noises.values())) == 1:
        first, noise = next(iter(noises.items()))
        whence = f"as on the standard task{' when it was tuned' * is_tuned}" if noise == typical else "as before"
        return (
            f"If differences to {control} scatter by {_percent(noise)} of the loss from seed to seed, {whence}, "
            f"{seeds} show one of {_percent(shown[first])} at least 4 times in 5, and one of {sought} needs "
            f"{needed[first]}."
        )
    parts = ", ".join(f"{name} {_percent(shown[name])} ({needed[name]})" for name in noises)
    return (
        f"By the scatter of earlier runs, {seeds} show these differences to {control} at least 4 times in 5 (in "
        f"brackets what {sought} needs): {parts}."
    )


def seeds_for_a_verdict(summary: Summary) -> str:
    """Say how many seeds would tell the variants apart that were not; empty if there are none."""
    control, number = summary.control, len(summary.variants) - 1
    needs = [
        f"{variant.name} {_seeds(_scatter(variant, control), number, pooled=summary.comparison.pooled)}"
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


def num_trials(grid: Grid) -> int:
    """Return the number of runs that tune one variant in one block."""
    starts, rates = len(grid.starts), len(grid.rates)
    return starts * rates if grid.search == "grid" else starts + rates - 1


def _seeds(noise: float, num_comparisons: int, *, pooled: bool) -> str:
    needed = seeds_needed(noise, _SOUGHT, num_comparisons=num_comparisons, pooled=pooled)
    return "more than a thousand seeds" if needed is None else f"{needed} seeds"


def _percent(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.3g} %"
