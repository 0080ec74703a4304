"""Compare gated, ungated and pointwise-nonlinear attention on linear and nonlinear decision boundaries.

The models are one attention layer and a linear readout, all with the same number of parameters. Each variant learns
each task at the learning rate that was best on separate seeds. The layer maps the plane of points to a surface, whose
curvature is measured at new points of the task's distribution, without noise, relative to the squared spread of the
surface.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from tidegate.geometry import gaussian_curvature
from tidegate.lab.judging import t_interval
from tidegate.lab.studies.boundary.correlation import MIN_TRIALS, Correlation, Trials, correlate
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR, TASKS, FloatArray, bayes_labels, tokens_of
from tidegate.lab.studies.boundary.training import (
    GATED,
    POINTWISE,
    BoundaryOptions,
    Classifier,
    draw_data,
    train_together,
)
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.intervals import format_interval, interval_panel
from tidegate.lab.studies.study import Study
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.report.page import Column, Intervals, Panel, Section, Table
from tidegate.tensors.palette import BLACK, LINES
from tidegate.torch import plain_kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One variant on one task under one seed."""

    variant: str
    task: str
    seed: int
    learning_rate: float
    accuracy: float
    curvature: float
    """Median of |K| over points, relative to the squared spread of the surface."""
    positive: float
    """Share of points with positive curvature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference in accuracy between a variant and a control, mean over tasks, with a 95 % interval over seeds."""

    variant: str
    control: str
    kind: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryResult:
    """All trials, with differences and correlations over them."""

    options: BoundaryOptions
    num_parameters: dict[str, int]
    trials: tuple[Trial, ...]
    differences: tuple[Difference, ...]
    correlations: tuple[Correlation, ...]


def run_boundary(options: BoundaryOptions, *, tell: Tell = ignore) -> BoundaryResult:
    """Tune, train and measure every variant on every task."""
    trials: list[Trial] = []
    for variant in report_parts(options.variants, tell, work="boundary"):
        rates = _best_rates(variant, options)
        cases = [(task, seed) for task in options.tasks for seed in range(options.num_seeds)]
        models, accuracies = train_together(variant, cases, [rates[task] for task, _ in cases], options)
        for place, (task, seed) in enumerate(cases):
            own = {name: value[place] for name, value in models.items()}
            curvature, positive = _curvature(variant, own, task, seed, options)
            trials.append(
                Trial(
                    variant=variant,
                    task=task,
                    seed=seed,
                    learning_rate=rates[task],
                    accuracy=accuracies[place],
                    curvature=curvature,
                    positive=positive,
                )
            )
    return _summarize(options, tuple(trials))


def _best_rates(variant: str, options: BoundaryOptions) -> dict[str, float]:
    """Choose for each task the learning rate with the best mean accuracy on the tuning seeds."""
    seeds = range(options.num_seeds, options.num_seeds + options.num_tuning_seeds)
    cases = [(task, seed) for task in options.tasks for _ in options.learning_rates for seed in seeds]
    rates = [rate for _ in options.tasks for rate in options.learning_rates for _ in seeds]
    _, accuracies = train_together(variant, cases, rates, options)
    table = np.array(accuracies).reshape(len(options.tasks), len(options.learning_rates), -1).mean(axis=-1)
    return {
        task: options.learning_rates[int(best)] for task, best in zip(options.tasks, table.argmax(axis=1), strict=True)
    }


def _curvature(
    variant: str, parameters: dict[str, Tensor], task: str, seed: int, options: BoundaryOptions
) -> tuple[float, float]:
    """Return median relative |K| of the layer's image of the plane, and the share of positive curvature."""
    model = Classifier(variant).double()
    model.load_state_dict({name: value.double() for name, value in parameters.items()})
    points, _ = TASKS[task](np.random.default_rng(10_000 + seed), options.num_points)
    base = torch.from_numpy(tokens_of(np.zeros(2), task))
    slopes = torch.from_numpy(np.stack([tokens_of(axis, task) for axis in np.eye(2)])) - base

    def surface(point: Tensor) -> Tensor:
        return model.represent((base + point[0] * slopes[0] + point[1] * slopes[1])[None])[0]

    at = torch.from_numpy(points)
    with torch.no_grad(), plain_kernel():
        spread = float(torch.stack([surface(point) for point in at]).var(dim=0).sum())
    curvature = gaussian_curvature(surface, at, covariance=spread)
    return float(curvature.abs().median()), float((curvature > 0).double().mean())


def _summarize(options: BoundaryOptions, trials: tuple[Trial, ...]) -> BoundaryResult:
    kinds = {"linear": LINEAR, "nonlinear": NONLINEAR}
    pairs = [(variant, "none") for variant in options.variants if variant != "none"]
    pairs += [(variant, control) for control in POINTWISE for variant in options.variants if variant in GATED]
    differences = tuple(
        _compare(trials, variant, control, tasks, kind=kind)
        for kind, tasks in kinds.items()
        for variant, control in pairs
        if control in options.variants
    )
    bent = [trial for trial in trials if trial.task in NONLINEAR]
    sets = {
        "all variants": list(options.variants),
        "gates": [name for name in options.variants if name in GATED],
        "pointwise": [name for name in options.variants if name in POINTWISE],
        "no gate": ["none"],
    }
    metrics = {
        among: [
            (trial.task, trial.seed, np.log(trial.curvature), trial.accuracy) for trial in bent if trial.variant in of
        ]
        for among, of in sets.items()
    }
    correlations = tuple(correlate(among, each) for among, each in metrics.items() if len(each) >= MIN_TRIALS)
    return BoundaryResult(
        options=options,
        num_parameters={
            name: sum(parameter.numel() for parameter in Classifier(name).parameters()) for name in options.variants
        },
        trials=trials,
        differences=differences,
        correlations=correlations,
    )


def accuracy_by_seed(trials: Sequence[Trial], variant: str, tasks: Collection[str]) -> FloatArray:
    """Return a variant's mean accuracy over the tasks, by seed."""
    chosen = [trial for trial in trials if trial.variant == variant and trial.task in tasks]
    seeds = sorted({trial.seed for trial in chosen})
    return np.array([fmean(trial.accuracy for trial in chosen if trial.seed == seed) for seed in seeds])


def _compare(trials: Sequence[Trial], variant: str, control: str, tasks: Collection[str], *, kind: str) -> Difference:
    by_seed = accuracy_by_seed(trials, variant, tasks) - accuracy_by_seed(trials, control, tasks)
    return _difference(by_seed, variant=variant, control=control, kind=kind)


def _difference(by_seed: FloatArray, *, variant: str, control: str, kind: str) -> Difference:
    low, high = t_interval(by_seed.tolist())
    return Difference(variant=variant, control=control, kind=kind, value=float(by_seed.mean()), low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class NonlinearGains:
    """Gains of the variants over none on nonlinear boundaries, with and without the task of the largest difference."""

    by_task: dict[str, tuple[Difference, ...]]
    together: tuple[Difference, ...]
    """Means over all tasks."""
    decisive: str
    """The task with the largest gain or loss, averaged over variants."""
    others: tuple[str, ...]
    """The other tasks; may be empty."""
    without: tuple[Difference, ...]
    """Means over the other tasks."""


def nonlinear_gains(result: BoundaryResult) -> NonlinearGains:
    """Compare every variant with none under the same seed, on nonlinear boundaries."""

    def gains(tasks: Collection[str], kind: str) -> tuple[Difference, ...]:
        variants = (variant for variant in result.options.variants if variant != "none")
        return tuple(_compare(result.trials, variant, "none", tasks, kind=kind) for variant in variants)

    tasks = [task for task in result.options.tasks if task in NONLINEAR]
    by_task = {task: gains([task], task) for task in tasks}
    decisive = max(tasks, key=lambda task: abs(np.mean([each.value for each in by_task[task]])))
    others = tuple(task for task in tasks if task != decisive)
    return NonlinearGains(
        by_task=by_task,
        together=gains(tasks, "nonlinear"),
        decisive=decisive,
        others=others,
        without=gains(others, f"nonlinear but {decisive}") if others else (),
    )


def excess_errors(result: BoundaryResult) -> tuple[Difference, ...]:
    """Return each variant's error rate above that of the Bayes classifier on linear boundaries, the mean over tasks."""
    tasks = [task for task in result.options.tasks if task in LINEAR]
    best = bayes_accuracies(result)
    return tuple(
        _difference(
            best - accuracy_by_seed(result.trials, variant, tasks), variant=variant, control="Bayes", kind="linear"
        )
        for variant in result.options.variants
    )


def bayes_accuracies(result: BoundaryResult) -> FloatArray:
    """Return the Bayes classifier's accuracy by seed, the mean over the test sets of linear boundaries."""
    options = result.options
    by_task: list[list[float]] = []
    for task in (task for task in options.tasks if task in LINEAR):
        drawn = (draw_data(task, seed, options) for seed in range(options.num_seeds))
        by_task.append([float((bayes_labels(task, inputs) == labels).mean()) for _, _, inputs, labels in drawn])
    return np.mean(by_task, axis=0)


def correlation_levels(result: BoundaryResult, gains: NonlinearGains) -> tuple[Correlation, ...]:
    """Correlate accuracy with log curvature on nonlinear boundaries, within and between tasks and variants."""
    trials = [trial for trial in result.trials if trial.task in NONLINEAR]

    def rows(group: str, tasks: Collection[str] = tuple(gains.by_task)) -> Trials:
        """List trials grouped by one of their fields, or all in one group."""
        return [
            (getattr(t, group, group), t.seed, math.log(t.curvature), t.accuracy) for t in trials if t.task in tasks
        ]

    levels = {
        "within tasks": rows("task"),
        f"within {gains.decisive}": rows("task", [gains.decisive]),
        f"within tasks other than {gains.decisive}": rows("task", gains.others),
        "over all trials": rows("all"),
    }
    found = [correlate(among, each) for among, each in levels.items() if len(each) >= MIN_TRIALS]
    if len(result.options.variants) >= MIN_TRIALS:
        found.append(correlate("over the means of variants", rows("variant"), of_means=True))
    return tuple(found)


def finding(result: BoundaryResult) -> str:
    """State the result in sentences."""
    gains = nonlinear_gains(result)
    return " ".join((_linear(result), _nonlinear(gains), *_beside_pointwise(result), _correlations(result, gains)))


def _linear(result: BoundaryResult) -> str:
    excess = excess_errors(result)
    plain = next(each for each in excess if each.variant == "none")
    return (
        f"Linear boundaries: the Bayes classifier has an accuracy of {bayes_accuracies(result).mean():.4f}; error "
        f"rates above its own: {_list(excess, '+.4f')}. No variant could improve on none by more than "
        f"{plain.value:.4f}."
    )


def _nonlinear(gains: NonlinearGains) -> str:
    significant = {
        task: [f"{each.variant} {each.value:+.3f}" for each in found if each.low > 0 or each.high < 0]
        for task, found in gains.by_task.items()
    }
    words = "; ".join(f"{task}: {', '.join(found) or 'no difference'}" for task, found in significant.items())
    count = sum(map(len, gains.by_task.values()))
    without = f" Without {gains.decisive}, where they differ most: {_list(gains.without, '+.3f')}."
    return (
        "Nonlinear boundaries: differences in accuracy from none under the same seed whose 95 % interval excludes 0 "
        f"({count} intervals, not simultaneous): {words}. Means over these tasks: {_list(gains.together, '+.3f')}."
        + (without if gains.without else "")
    )


def _beside_pointwise(result: BoundaryResult) -> Iterable[str]:
    for control in POINTWISE:
        differences = [
            each
            for each in result.differences
            if each.control == control and each.kind == "nonlinear" and each.variant in GATED
        ]
        if differences:
            yield f"Gates compared with {control} in their place, all nonlinear tasks: {_list(differences, '+.3f')}."


def _correlations(result: BoundaryResult, gains: NonlinearGains) -> str:
    levels = correlation_levels(result, gains)
    values = [each.value for each in levels]

    def words(correlations: Iterable[Correlation]) -> str:
        return "; ".join(f"{each.among} r = {format_interval(each, '.2f')}" for each in correlations)

    # The first of the record's own is the one within tasks.
    among = words(result.correlations[1:])
    return (
        f"The correlation of accuracy with log curvature on nonlinear boundaries lies between {min(values):.2f} and "
        f"{max(values):.2f}, depending on the level: {words(levels)}."
        + (f" Within tasks among some variants: {among}." if among else "")
    )


def _list(differences: Iterable[Difference], form: str) -> str:
    return "; ".join(f"{each.variant} {format_interval(each, form)}" for each in differences)


def view(result: BoundaryResult) -> tuple[Section, ...]:
    """Return accuracy by task, the gains of gates, and the correlation of curvature with accuracy."""
    gains = nonlinear_gains(result)
    counts = ", ".join(f"{name} {count}" for name, count in result.num_parameters.items())
    return (
        Section(
            title="Accuracy",
            lead=f"Means over {result.options.num_seeds} seeds. Parameters: {counts}.",
            panels=(_table(result, "accuracy", "Test accuracy", 3), _excess(result), *_gains(result, gains)),
        ),
        Section(
            title="Curvature",
            lead="Curvature of the layer's image of the plane of points, relative to its squared spread.",
            panels=(
                _table(result, "curvature", "Median |K|", 3),
                _table(result, "positive", "Share of positive curvature", 2),
                _table(result, "learning_rate", "Learning rates, chosen on separate seeds", 3),
                _correlation_panel("by level", correlation_levels(result, gains)),
                _correlation_panel("within tasks, among some variants", result.correlations),
            ),
        ),
    )


def figures(result: BoundaryResult) -> dict[str, Figure]:
    """Draw accuracy against curvature on nonlinear boundaries, one mark per trial."""
    gains = nonlinear_gains(result)
    figure = new_figure(5.4, 4.2)
    axes = figure.subplots()
    label_axes(axes, title="Bent boundaries, one mark a trial", x="median |K|, relative", y="accuracy")
    # Leave room for the correlations below the marks.
    axes.set_ylim(0.2, 1.03)
    levels = "\n".join(f"r = {each.value:.2f} {each.among}" for each in correlation_levels(result, gains))
    axes.text(0.03, 0.03, levels, transform=axes.transAxes, fontsize=6.5, va="bottom")
    axes.set_xscale("log")
    marks = {task: "x" if task == gains.decisive else "." for task in gains.by_task}
    gated = [variant for variant in result.options.variants if variant != "none"]
    for variant, color in {"none": BLACK, **dict(zip(gated, LINES, strict=False))}.items():
        for task, mark in marks.items():
            trials = _trials_of(result, variant, task)
            x, y = ([getattr(trial, name) for trial in trials] for name in ("curvature", "accuracy"))
            axes.plot(x, y, mark, color=color, markersize=3, alpha=0.7)
        axes.plot([], [], "s", color=color, markersize=4, label=variant)
    axes.plot([], [], "x", color=GREY, markersize=3, label=gains.decisive)
    axes.plot([], [], ".", color=GREY, markersize=3, label="other tasks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return {"boundary.svg": figure}


def _trials_of(result: BoundaryResult, variant: str, task: str) -> list[Trial]:
    return [trial for trial in result.trials if trial.variant == variant and trial.task == task]


def _table(result: BoundaryResult, figure: str, title: str, digits: int) -> Table:
    columns = (Column(title="task"), *(Column(title=name, digits=digits) for name in result.options.variants))
    rows = tuple(
        (
            task,
            *(
                float(np.mean([getattr(trial, figure) for trial in _trials_of(result, variant, task)]))
                for variant in result.options.variants
            ),
        )
        for task in result.options.tasks
    )
    return Table(title=title, columns=columns, rows=rows)


def _excess(result: BoundaryResult) -> Intervals:
    best = bayes_accuracies(result).mean()
    return interval_panel(
        f"Error rates on linear boundaries above those of the Bayes classifier, whose accuracy is {best:.4f}",
        "difference in error rate, 95 % intervals over seeds",
        {each.variant: each for each in excess_errors(result)},
        form="+.4f",
    )


def _gains(result: BoundaryResult, gains: NonlinearGains) -> tuple[Panel, ...]:
    by_kind = {**gains.by_task, "all nonlinear tasks": gains.together}
    if gains.without:
        by_kind[f"all nonlinear tasks but {gains.decisive}"] = gains.without
    panels = {f"Difference in accuracy from none on {kind}": found for kind, found in by_kind.items()}
    for kind in ("linear", "nonlinear"):
        for control in dict.fromkeys(each.control for each in result.differences):
            if (kind, control) != ("nonlinear", "none"):
                panels[f"Difference in accuracy from {control} on {kind} boundaries"] = tuple(
                    each for each in result.differences if (each.kind, each.control) == (kind, control)
                )
    x_label = "difference in accuracy, 95 % intervals over seeds"
    return tuple(
        interval_panel(title, x_label, {each.variant: each for each in found}, form="+.3f")
        for title, found in panels.items()
    )


def _correlation_panel(which: str, found: tuple[Correlation, ...]) -> Intervals:
    title = f"Correlation of accuracy with log curvature on nonlinear boundaries, {which}"
    by_level = {each.among: each for each in found}
    return interval_panel(title, "r, 95 % intervals by resampling seeds", by_level, form=".2f")


STUDY = Study(
    name="boundary",
    question=QUESTIONS["boundary"],
    claim="arXiv 2604.14702 claims that gated models win on nonlinear decision boundaries, that they have no "
    "consistent advantage on linear ones, and that curvature correlates with accuracy (r = 0.79). Tasks, models and "
    "the measure of curvature are our own, and we do not know over which trials that r was taken.",
    options=BoundaryOptions(),
    result=BoundaryResult,
    run=run_boundary,
    finding=finding,
    view=view,
    figures=figures,
)
