"""Before the runs: how many there will be, how long they take, and what they can show. After them: what more would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    base  : the first run of each variant
    costs : how fast each variant trains
    """
    return " ".join((*_work(request, base, costs), *_power(request)))


def _work(request: Request, base: Mapping[str, Run], costs: Costs) -> Iterator[str]:
    trials = 0 if request.grid is None else num_trials(request.grid)
    compared = len(request.runs) or request.num_seeds * len(base)
    speeds = {cost.variant: cost.tokens_per_second for cost in costs.items}
    seconds = request.num_seeds * sum(
        (_worth_in_tokens(run) + trials * _worth_in_tokens(as_trial(run))) / speeds[name] for name, run in base.items()
    )
    cores = num_cores()
    tuned = f"{number_of(trials * request.num_seeds * len(base), 'run')} to tune and " if trials else ""
    yield (
        f"This will train {tuned}{number_of(compared, 'run')} to compare, for about {_duration(seconds / cores)} on "
        f"{number_of(cores, 'core')}."
    )


def _worth_in_tokens(run: Run) -> float:
    """The training tokens of a run and, in as many as take as long, those that it is evaluated on."""
    data, options = run.task.load(), run.training
    at_points, at_end = (sum(len(batch.inputs) for batch in batches) for batches in (data.validation(), data.final()))
    rows = options.steps * options.batch_size + _FORWARD_SHARE * (options.num_evaluations * at_points + at_end)
    return rows * run.task.length


def _power(request: Request) -> Iterator[str]:
    """Which difference each variant's runs will show; nothing for given runs, or with too few seeds for a verdict.

    Judged by each variant's own pairs: equal spreads would show smaller ones, but nobody knows before that they are.
    """
    plans = [variant.plan() for variant in request.variants if variant is not request.control]
    is_tuned = request.grid is not None and request.grid.chooses
    typical = TUNED_NOISE if is_tuned else TYPICAL_NOISE
    noises: dict[str, float] = {}
    for plan in plans:
        known = None if request.settings is None else request.settings.noise_of(plan)
        noises[plan.name] = typical if known is None else known
    shown = {name: _difference(noise, request) for name, noise in noises.items()}
    if request.runs or None in shown.values():
        return
    sought, seeds = _percent(_SOUGHT), f"{request.num_seeds} seeds"
    if len(set(noises.values())) == 1:
        first = plans[0].name
        noise = noises[first]
        whence = f"as on the standard task{' when it was tuned' * is_tuned}" if noise == typical else "as before"
        yield (
            f"If differences to {request.control.name} scatter by {_percent(noise)} of the loss from seed to seed, "
            f"{whence}, {seeds} show one of {_percent(shown[first])} at least 4 times in 5, and one of {sought} needs "
            f"{_seeds(noise, len(plans), pooled=False)}."
        )
        return
    parts = (
        f"{name} {_percent(shown[name])} ({_seeds(noise, len(plans), pooled=False)})" for name, noise in noises.items()
    )
    yield (
        f"By the scatter of earlier runs, {seeds} show these differences to {request.control.name} at least 4 times in "
        f"5 (in brackets what {sought} needs): {', '.join(parts)}."
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
    """Standard deviation between seeds of a variant's difference to the control, as a share of the control's loss."""
    losses = [(own.loss, other.loss) for own, other in zip(variant.records, control.records, strict=True)]
    pairs = [(own, other) for own, other in losses if own is not None and other is not None]
    return stdev(own - other for own, other in pairs) / fmean(other for _, other in pairs)


def num_trials(grid: Grid) -> int:
    """Runs that tune one variant in one block."""
    starts, rates = len(grid.starts), len(grid.rates)
    return starts * rates if grid.search == "grid" else starts + rates - 1


def _difference(noise: float, request: Request) -> float | None:
    number = len(request.variants) - 1
    return detectable_difference(noise, num_blocks=request.num_seeds, num_comparisons=number, pooled=False)


def _seeds(noise: float, num_comparisons: int, *, pooled: bool) -> str:
    needed = seeds_needed(noise, _SOUGHT, num_comparisons=num_comparisons, pooled=pooled)
    return "more than a thousand seeds" if needed is None else f"{needed} seeds"


def _percent(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.3g} %"


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} min"
