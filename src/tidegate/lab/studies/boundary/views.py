"""Accuracy and curvature of all trials, as panels and a figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tidegate.lab.judging import t_interval
from tidegate.lab.studies.boundary.correlation import Correlation
from tidegate.lab.studies.boundary.finding import Bent, bayes_accuracies, bent_gains, correlation_levels, excess_errors
from tidegate.lab.studies.boundary.result import BoundaryResult, Difference, Trial
from tidegate.lab.studies.boundary.tasks import NONLINEAR
from tidegate.lab.studies.drawing import COLOURS, GREY, label_axes, new_figure
from tidegate.lab.studies.study import StudyView
from tidegate.report.page import Column, Estimate, Intervals, Panel, Section, Table


def view(result: BoundaryResult) -> StudyView:
    """Show an answer as sections of a page and as figures."""
    bent = bent_gains(result)
    levels = correlation_levels(result, bent)
    return StudyView(sections=_sections(result, bent, levels), figures=_figures(result, bent, levels))


def _sections(result: BoundaryResult, bent: Bent, levels: tuple[Correlation, ...]) -> tuple[Section, ...]:
    """Accuracy by task, what gates gain, and how curvature goes with accuracy."""
    counts = ", ".join(f"{name} {count}" for name, count in result.num_parameters.items())
    return (
        Section(
            title="Accuracy",
            lead=f"Means over {result.options.num_seeds} seeds. Parameters: {counts}.",
            panels=(_table(result, "accuracy", "Accuracy on the test set", 3), _excess(result), *_gains(result, bent)),
        ),
        Section(
            title="Curvature",
            lead="Of the surface that the layer makes of the plane of points, relative to its squared spread.",
            panels=(
                _table(result, "curvature", "Median |K|", 3),
                _table(result, "positive", "Share of positive curvature", 2),
                _table(result, "learning_rate", "Learning rates, chosen on other seeds", 3),
                _correlations("by level", levels),
                _correlations("within tasks, among some variants", result.correlations),
            ),
        ),
    )


def _figures(result: BoundaryResult, bent: Bent, levels: tuple[Correlation, ...]) -> dict[str, Figure]:
    """Accuracy by task and variant; what gates gain; accuracy against curvature."""
    figure = new_figure(9.6, 3.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.6, 1, 1.3))
    _draw_accuracy(left, result)
    _draw_gains(middle, result, bent)
    _draw_scatter(right, result, bent, levels)
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


def _draw_gains(axes: Any, result: BoundaryResult, bent: Bent) -> None:
    variants = [name for name in result.options.variants if name != "none"]
    label_axes(axes, title="Accuracy less that without a gate", x="difference, 95 % intervals over seeds")
    axes.axvline(0, color=GREY, linewidth=0.8)
    kinds = {"all bent tasks": ("o", bent.together), f"without {bent.decisive}": ("D", bent.without)}
    for place, (label, (marker, found)) in enumerate(kinds.items()):
        for each in found:
            y = variants.index(each.variant) + (0.3 * place - 0.15)
            colour = _colour(result, each.variant)
            face = "white" if place else colour
            axes.plot([each.low, each.high], [y, y], color=colour, linewidth=1.2)
            axes.plot([each.value], [y], marker, color=colour, markerfacecolor=face, markersize=4)
        axes.plot([], [], marker, color=GREY, markerfacecolor="white" if place else GREY, markersize=4, label=label)
    axes.set_yticks(range(len(variants)), variants)
    # Room for the legend below the last row.
    axes.set_ylim(len(variants) + 0.4, -0.6)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _draw_scatter(axes: Any, result: BoundaryResult, bent: Bent, levels: tuple[Correlation, ...]) -> None:
    shown = "\n".join(f"r = {each.value:.2f} {each.among}" for each in levels)
    label_axes(axes, title="Bent boundaries, one mark a trial", x="median |K|, relative", y="accuracy")
    # Room for the correlations below the marks.
    axes.set_ylim(0.2, 1.03)
    axes.text(0.03, 0.03, shown, transform=axes.transAxes, fontsize=6.5, va="bottom")
    axes.set_xscale("log")
    for variant in result.options.variants:
        for tasks, marker in (((bent.decisive,), "x"), (bent.others, ".")):
            trials = [trial for trial in result.trials if trial.variant == variant and trial.task in tasks]
            x, y = ([getattr(trial, name) for trial in trials] for name in ("curvature", "accuracy"))
            axes.plot(x, y, marker, color=_colour(result, variant), markersize=3, alpha=0.7)
    axes.plot([], [], "x", color=GREY, markersize=3, label=bent.decisive)
    axes.plot([], [], ".", color=GREY, markersize=3, label="other tasks")
    axes.legend(fontsize=6.5, frameon=False, loc="center right")


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
    return _intervals(
        f"Errors on linear boundaries beyond those of the best possible guess, which is right in {best:.4f}",
        "difference of error, 95 % intervals over seeds",
        excess_errors(result),
        digits=4,
    )


def _gains(result: BoundaryResult, bent: Bent) -> tuple[Panel, ...]:
    by_kind = {**bent.by_task, "all nonlinear tasks": bent.together}
    if bent.without:
        by_kind[f"all nonlinear tasks but {bent.decisive}"] = bent.without
    panels = {f"Accuracy on {kind}, less that of none": found for kind, found in by_kind.items()}
    for kind in ("linear", "nonlinear"):
        for control in dict.fromkeys(each.control for each in result.differences):
            if (kind, control) != ("nonlinear", "none"):
                panels[f"Accuracy on {kind} boundaries, less that of {control}"] = tuple(
                    each for each in result.differences if (each.kind, each.control) == (kind, control)
                )
    return tuple(
        _intervals(title, "difference of accuracy, 95 % intervals over seeds", found, digits=3)
        for title, found in panels.items()
    )


def _intervals(title: str, x_label: str, found: Iterable[Difference], *, digits: int) -> Intervals:
    items = tuple(Estimate(label=each.variant, value=each.value, low=each.low, high=each.high) for each in found)
    alternative = "; ".join(f"{item.label} {item.value:+.{digits}f}" for item in items)
    return Intervals(title=title, alternative=alternative, x_label=x_label, items=items)


def _correlations(which: str, found: tuple[Correlation, ...]) -> Intervals:
    return Intervals(
        title=f"Correlation of accuracy with log curvature on nonlinear boundaries, {which}",
        alternative="; ".join(f"{each.among} {each.value:.2f}" for each in found),
        x_label="r, 95 % intervals by resampling seeds",
        items=tuple(Estimate(label=each.among, value=each.value, low=each.low, high=each.high) for each in found),
    )
