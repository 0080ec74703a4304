"""Do gates help on bent boundaries more than on straight ones, is it the gate, and does curvature go with success?

One attention layer and a linear readout, with a gate, without one, and with a pointwise nonlinearity in the gate's
place, all of as many parameters. Each variant learns each task at the learning rate that did best on other seeds. The
layer makes a surface of the plane of points; its curvature is measured at points that are drawn anew from the task's
distribution, without noise, relative to the squared spread of the surface.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from tidegate.geometry import gaussian_curvature
from tidegate.lab.judging import t_interval
from tidegate.lab.studies.boundary.correlation import MIN_TRIALS, Correlation, correlate
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR, TASKS, FloatArray, tokens_of
from tidegate.lab.studies.boundary.training import GATED, POINTWISE, BoundaryOptions, Classifier, train_together
from tidegate.lab.training.events import Tell, ignore, report_parts
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
    """Accuracy of a variant less another's, mean over a kind of tasks, with a 95 % interval over seeds."""

    variant: str
    control: str
    kind: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryResult:
    """All trials and what they say together."""

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
    """Measure the surface that the layer makes of the plane: median relative |K|, and share of positive curvature."""
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
        difference_over_seeds(
            accuracy_by_seed(trials, variant, tasks) - accuracy_by_seed(trials, control, tasks),
            variant=variant,
            control=control,
            kind=kind,
        )
        for kind, tasks in kinds.items()
        for variant, control in pairs
        if {"none", control} <= set(options.variants)
    )
    bent = [trial for trial in trials if trial.task in NONLINEAR]
    sets = {
        "all variants": list(options.variants),
        "gates": [name for name in options.variants if name in GATED],
        "pointwise": [name for name in options.variants if name in POINTWISE],
        "no gate": ["none"],
    }
    figures = {
        among: [
            (trial.task, trial.seed, np.log(trial.curvature), trial.accuracy) for trial in bent if trial.variant in of
        ]
        for among, of in sets.items()
    }
    correlations = tuple(correlate(among, each) for among, each in figures.items() if len(each) >= MIN_TRIALS)
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
    """Return a variant's mean accuracy over some of the tasks, seed by seed."""
    chosen = [trial for trial in trials if trial.variant == variant and trial.task in tasks]
    seeds = sorted({trial.seed for trial in chosen})
    return np.array([fmean(trial.accuracy for trial in chosen if trial.seed == seed) for seed in seeds])


def difference_over_seeds(by_seed: FloatArray, *, variant: str, control: str, kind: str) -> Difference:
    """Return the mean of differences, one a seed, with its interval."""
    low, high = t_interval(by_seed.tolist())
    return Difference(variant=variant, control=control, kind=kind, value=float(by_seed.mean()), low=low, high=high)
