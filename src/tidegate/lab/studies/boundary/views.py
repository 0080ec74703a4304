"""Panels of accuracy and curvature of all trials, a figure of one against the other, and the study."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from tidegate.lab.studies.boundary.correlation import Correlation
from tidegate.lab.studies.boundary.run import (
    BoundaryResult,
    NonlinearGains,
    Trial,
    bayes_accuracies,
    correlation_levels,
    excess_errors,
    finding,
    nonlinear_gains,
    run_boundary,
)
from tidegate.lab.studies.boundary.training import BoundaryOptions
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.intervals import interval_panel
from tidegate.lab.studies.study import Study
from tidegate.report.page import Column, Intervals, Panel, Section, Table
from tidegate.tensors.palette import BLACK, LINES


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
                _correlations("by level", correlation_levels(result, gains)),
                _correlations("within tasks, among some variants", result.correlations),
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
    for variant, colour in {"none": BLACK, **dict(zip(gated, LINES, strict=False))}.items():
        for task, mark in marks.items():
            trials = _trials_of(result, variant, task)
            x, y = ([getattr(trial, name) for trial in trials] for name in ("curvature", "accuracy"))
            axes.plot(x, y, mark, color=colour, markersize=3, alpha=0.7)
        axes.plot([], [], "s", color=colour, markersize=4, label=variant)
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


def _correlations(which: str, found: tuple[Correlation, ...]) -> Intervals:
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
