"""Accuracy and curvature of all trials, as panels and a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tidegate.lab.judging import t_interval
from tidegate.lab.studies.boundary.result import BoundaryResult, Difference, Trial
from tidegate.lab.studies.boundary.tasks import NONLINEAR
from tidegate.lab.studies.drawing import COLOURS, GREY, label_axes, new_figure
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Column, Estimate, Intervals, Panel, Section, Table


def view(result: BoundaryResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    return StudyView(sections=_sections(result), figures=_figures(result))


def _sections(result: BoundaryResult) -> tuple[Section, ...]:
    """Accuracy by task, what gates gain, and how curvature goes with accuracy."""
    counts = ", ".join(f"{name} {count}" for name, count in result.num_parameters.items())
    return (
        Section(
            title="Accuracy",
            lead=f"Means over {result.options.num_seeds} seeds. Parameters: {counts}.",
            panels=(_table(result, "accuracy", "Accuracy on the test set", 3), *_gains(result)),
        ),
        Section(
            title="Curvature",
            lead="Of the surface that the layer makes of the plane of points, relative to its squared spread.",
            panels=(
                _table(result, "curvature", "Median |K|", 3),
                _table(result, "positive", "Share of positive curvature", 2),
                _table(result, "learning_rate", "Learning rates, chosen on other seeds", 3),
                _correlations(result),
            ),
        ),
    )


def _figures(result: BoundaryResult) -> dict[str, Figure]:
    """Accuracy by task and variant; what gates gain; accuracy against curvature."""
    figure = new_figure(9.6, 3.4)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.6, 1, 1.3))
    _draw_accuracy(left, result)
    _draw_gains(middle, result)
    _draw_scatter(right, result)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7, frameon=False)
    return {"boundary.svg": figure}


def _trials_of(result: BoundaryResult, variant: str, task: str) -> list[Trial]:
    return [trial for trial in result.trials if trial.variant == variant and trial.task == task]


def _colour(result: BoundaryResult, variant: str) -> str:
    others = [name for name in result.options.variants if name != "none"]
    return "black" if variant == "none" else COLOURS[others.index(variant)]


def _draw_accuracy(axes: Any, result: BoundaryResult) -> None:
    tasks, variants = result.options.tasks, result.options.variants
    label_axes(axes, title="Accuracy, means and 95 % intervals over seeds", y="accuracy")
    for place, variant in enumerate(variants):
        accuracies = [[trial.accuracy for trial in _trials_of(result, variant, task)] for task in tasks]
        means = np.array([np.mean(each) for each in accuracies])
        ends = np.array([t_interval(each) for each in accuracies])
        x = np.arange(len(tasks)) + (place - (len(variants) - 1) / 2) * 0.11
        spread = np.abs(ends.T - means)
        colour = _colour(result, variant)
        axes.errorbar(x, means, yerr=spread, fmt="o", color=colour, markersize=2.5, linewidth=0.9, label=variant)
    axes.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right")
    boundary = sum(task not in NONLINEAR for task in tasks) - 0.5
    axes.axvline(boundary, color=GREY, linewidth=0.8, linestyle="--")


def _draw_gains(axes: Any, result: BoundaryResult) -> None:
    shown = [each for each in result.differences if each.control == "none"]
    variants = [name for name in result.options.variants if name != "none"]
    label_axes(axes, title="Accuracy less that without a gate", x="difference")
    axes.axvline(0, color=GREY, linewidth=0.8)
    for each in shown:
        y = variants.index(each.variant) + (0.15 if each.kind == "nonlinear" else -0.15)
        full = _colour(result, each.variant) if each.kind == "nonlinear" else "white"
        colour = _colour(result, each.variant)
        axes.plot([each.low, each.high], [y, y], color=colour, linewidth=1.2)
        axes.plot([each.value], [y], "o", color=colour, markerfacecolor=full, markersize=4)
    axes.set_yticks(range(len(variants)), variants)
    axes.invert_yaxis()
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", markersize=4, label="linear")
    axes.plot([], [], "o", color=GREY, markersize=4, label="nonlinear")
    axes.legend(fontsize=7, frameon=False)


def _draw_scatter(axes: Any, result: BoundaryResult) -> None:
    whole = result.correlations[0]
    label_axes(
        axes,
        title=f"Nonlinear boundaries: r = {whole.value:.2f}\n({whole.low:.2f} … {whole.high:.2f}) within tasks",
        x="median |K|, relative",
        y="accuracy",
    )
    axes.set_xscale("log")
    for variant in result.options.variants:
        trials = [trial for trial in result.trials if trial.variant == variant and trial.task in NONLINEAR]
        x, y = ([getattr(trial, name) for trial in trials] for name in ("curvature", "accuracy"))
        axes.plot(x, y, ".", color=_colour(result, variant), markersize=2.5, alpha=0.7)


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


def _gains(result: BoundaryResult) -> tuple[Panel, ...]:
    controls = dict.fromkeys(each.control for each in result.differences)
    return tuple(_gain(result, control, kind) for kind in ("linear", "nonlinear") for control in controls)


def _gain(result: BoundaryResult, control: str, kind: str) -> Intervals:
    chosen = [each for each in result.differences if each.control == control and each.kind == kind]
    return Intervals(
        title=f"Accuracy on {kind} boundaries, less that of {control}",
        alternative="; ".join(f"{each.variant} {each.value:+.3f}" for each in chosen),
        x_label="difference of accuracy, 95 % intervals over seeds",
        items=tuple(map(_estimate, chosen)),
    )


def _estimate(each: Difference) -> Estimate:
    return Estimate(label=each.variant, value=each.value, low=each.low, high=each.high)


def _correlations(result: BoundaryResult) -> Intervals:
    return Intervals(
        title="Correlation of accuracy with log curvature on nonlinear boundaries, within tasks",
        alternative="; ".join(f"{each.among} {each.value:.2f}" for each in result.correlations),
        x_label="r, 95 % intervals by resampling seeds",
        items=tuple(
            Estimate(label=each.among, value=each.value, low=each.low, high=each.high) for each in result.correlations
        ),
    )
