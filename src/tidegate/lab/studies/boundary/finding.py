"""What the trials say: task by task, beside the best possible guess, and at every level of the correlation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from tidegate.lab.studies.boundary.bayes import bayes_labels
from tidegate.lab.studies.boundary.correlation import MIN_TRIALS, Correlation, Trials, correlate, correlate_means
from tidegate.lab.studies.boundary.run import (
    BoundaryResult,
    Difference,
    accuracy_by_seed,
    difference_over_seeds,
)
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR, FloatArray
from tidegate.lab.studies.boundary.training import GATED, POINTWISE, draw_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Bent:
    """What variants gain over none on bent boundaries, with and without the task on which they differ most."""

    by_task: dict[str, tuple[Difference, ...]]
    together: tuple[Difference, ...]
    """In the mean over tasks."""
    decisive: str
    """The task with the largest gain or loss, in the mean over variants."""
    others: tuple[str, ...]
    """The other tasks; empty if there are none."""
    without: tuple[Difference, ...]
    """In the mean over those."""


def bent_gains(result: BoundaryResult) -> Bent:
    """Compare every variant with none under the same seed, on bent boundaries."""
    tasks = [task for task in result.options.tasks if task in NONLINEAR]
    by_task = {task: _gains(result, [task], kind=task) for task in tasks}
    decisive = max(tasks, key=lambda task: abs(np.mean([each.value for each in by_task[task]])))
    others = tuple(task for task in tasks if task != decisive)
    return Bent(
        by_task=by_task,
        together=_gains(result, tasks, kind="nonlinear"),
        decisive=decisive,
        others=others,
        without=_gains(result, others, kind=f"nonlinear but {decisive}") if others else (),
    )


def excess_errors(result: BoundaryResult) -> tuple[Difference, ...]:
    """Return how much more often each variant errs than the best possible guess, on straight boundaries.

    Both on the same test sets, which are drawn again; the mean over tasks.
    """
    tasks = [task for task in result.options.tasks if task in LINEAR]
    best = bayes_accuracies(result)
    return tuple(
        difference_over_seeds(
            best - accuracy_by_seed(result.trials, variant, tasks),
            variant=variant,
            control="the best possible guess",
            kind="linear",
        )
        for variant in result.options.variants
    )


def bayes_accuracies(result: BoundaryResult) -> FloatArray:
    """Return by seed the accuracy of the best possible guess, the mean over the test sets of straight boundaries."""
    options = result.options
    by_task: list[list[float]] = []
    for task in (task for task in options.tasks if task in LINEAR):
        drawn = (draw_data(task, seed, options) for seed in range(options.num_seeds))
        by_task.append([float((bayes_labels(task, inputs) == labels).mean()) for _, _, inputs, labels in drawn])
    return np.mean(by_task, axis=0)


def correlation_levels(result: BoundaryResult, bent: Bent) -> tuple[Correlation, ...]:
    """Correlate accuracy with log curvature on bent boundaries at every level at which it may be read."""
    trials = [trial for trial in result.trials if trial.task in NONLINEAR]

    def rows(group: str, tasks: Collection[str] = tuple(bent.by_task)) -> Trials:
        """List trials by a field of theirs, or all in one group."""
        return [
            (getattr(t, group, group), t.seed, math.log(t.curvature), t.accuracy) for t in trials if t.task in tasks
        ]

    levels = {
        "within tasks": rows("task"),
        f"within {bent.decisive}": rows("task", [bent.decisive]),
        f"within tasks other than {bent.decisive}": rows("task", bent.others),
        "over all trials": rows("all"),
    }
    found = [correlate(among, each) for among, each in levels.items() if len(each) >= MIN_TRIALS]
    if len(result.options.variants) >= MIN_TRIALS:
        found.append(correlate_means("over the means of variants", rows("variant")))
    return tuple(found)


def finding(result: BoundaryResult) -> str:
    """Say what holds, from the numbers."""
    bent = bent_gains(result)
    return " ".join((_straight(result), _bent(bent), _beside_pointwise(result), _curvature(result, bent)))


def _straight(result: BoundaryResult) -> str:
    excess = excess_errors(result)
    plain = next(each for each in excess if each.variant == "none")
    return (
        f"Straight boundaries: the best possible guess is right in {bayes_accuracies(result).mean():.4f} of the test "
        f"sets, and variants err more often than it by {_list(excess, 4)}. So no variant could be better than none by "
        f"more than {plain.value:.4f} there."
    )


def _bent(bent: Bent) -> str:
    seen = {task: [each for each in found if each.low > 0 or each.high < 0] for task, found in bent.by_task.items()}
    words = "; ".join(
        f"{task}: {', '.join(f'{each.variant} {each.value:+.3f}' for each in found) or 'nothing'}"
        for task, found in seen.items()
    )
    count = sum(map(len, bent.by_task.values()))
    without = f" Without {bent.decisive}, where they differ most: {_list(bent.without, 3)}." if bent.without else ""
    return (
        f"Bent boundaries, accuracy less that of none under the same seed, where the 95 % interval excludes 0 (each of "
        f"{count} by itself): {words}. In the mean over these tasks: {_list(bent.together, 3)}.{without}"
    )


def _beside_pointwise(result: BoundaryResult) -> str:
    parts: list[str] = []
    for control in POINTWISE:
        beside = [
            each
            for each in result.differences
            if each.control == control and each.kind == "nonlinear" and each.variant in GATED
        ]
        if beside:
            parts.append(f"Gates less {control} in their place, all bent tasks: {_list(beside, 3)}.")
    return " ".join(parts)


def _curvature(result: BoundaryResult, bent: Bent) -> str:
    levels = correlation_levels(result, bent)
    values = [each.value for each in levels]
    # The first of the record's own is the one within tasks.
    among = "; ".join(_in_words(each) for each in result.correlations[1:])
    return (
        f"Correlation of accuracy with log curvature on bent boundaries lies between {min(values):.2f} and "
        f"{max(values):.2f}, depending on the level: {'; '.join(map(_in_words, levels))}."
        + (f" Within tasks among some variants: {among}." if among else "")
    )


def _in_words(each: Correlation) -> str:
    return f"{each.among} r = {each.value:.2f} ({each.low:.2f} … {each.high:.2f})"


def _list(differences: Iterable[Difference], digits: int) -> str:
    return "; ".join(
        f"{each.variant} {each.value:+.{digits}f} ({each.low:+.{digits}f} … {each.high:+.{digits}f})"
        for each in differences
    )


def _gains(result: BoundaryResult, tasks: Collection[str], *, kind: str) -> tuple[Difference, ...]:
    plain = accuracy_by_seed(result.trials, "none", tasks)
    return tuple(
        difference_over_seeds(
            accuracy_by_seed(result.trials, variant, tasks) - plain, variant=variant, control="none", kind=kind
        )
        for variant in result.options.variants
        if variant != "none"
    )
