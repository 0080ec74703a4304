"""Run experiments on sample size: draw data from known experts, fit from several starts, and measure the errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidegate._validation import InputError, require_sizes
from tidegate.experts.fitting import CellData, Fits, fit_batch
from tidegate.experts.layers import Floats
from tidegate.experts.models import Design, ExpertModel, ExpertTruth, Placement, default_design, default_truth
from tidegate.experts.voronoi import Atoms, LossKind, voronoi_loss

METRICS = ("expert", "covered", "over", "total", "regression", "scores")
"""Errors of a fit: of the merged experts, of gates in cells with one and with several atoms, the sum of these three, of
the regression function, and of the score matrix."""

_INDISTINGUISHABLE = 0.1
"""Fits whose objectives (2 log-likelihood) differ by less are equally good."""
_NEAR_GATES = 0.2
_VALLEY_PATIENCE = 5
"""With surplus experts a fit can pause in flat valleys."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertExperiment:
    """Fit k experts to data from k_star, at several sample sizes.

    Starts are the truth plus normal noise of standard deviation `radius`, the same at every n: starts that approached
    the truth with n would show a rate where there is none.
    """

    placement: Placement
    """Placement of the gate in the true and the fitted model."""
    k: int = 2
    """Number of fitted experts."""
    k_star: int = 2
    """Number of true experts."""
    truth: ExpertTruth | None = None
    """None for `default_truth`."""
    design: Design = field(default_factory=default_design)
    noise: float = 0.3
    """Standard deviation of the noise."""
    ns: tuple[int, ...] = (100, 316, 1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
    """Sample sizes."""
    replicates: int = 96
    starts: int = 4
    radius: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_sizes(k=self.k, k_star=self.k_star, replicates=self.replicates)
        if self.k < self.k_star:
            raise InputError("k", expected=f"at least k_star, which is {self.k_star}", got=self.k)
        if self.starts < 2:
            raise InputError("starts", expected="at least 2, to measure a spread", got=self.starts)
        for name in ("noise", "radius"):
            if not (value := getattr(self, name)) > 0:
                raise InputError(name, expected="positive", got=value)
        if not self.ns or min(self.ns) < self.model.num_parameters:
            expected = f"sample sizes of at least the number of parameters, {self.model.num_parameters}"
            raise InputError("ns", expected=expected, got=self.ns)
        truth = self.true_parameters
        self._check_truth(truth)
        if self.model.gated_experts:
            self._warn_of_gates(truth)

    @property
    def model(self) -> ExpertModel:
        """Return the fitted model."""
        return ExpertModel(placement=self.placement, k=self.k, width=self.design.points.shape[-1])

    @property
    def true_model(self) -> ExpertModel:
        """Return the model of the data."""
        return ExpertModel(placement=self.placement, k=self.k_star, width=self.design.points.shape[-1])

    @property
    def true_parameters(self) -> ExpertTruth:
        """Return the given or default truth."""
        return default_truth(self.placement) if self.truth is None else self.truth

    def _check_truth(self, truth: ExpertTruth) -> None:
        model = self.true_model
        shapes = {"scores": (model.width, model.width), "experts": (self.k_star, model.width), "gate": model.gate_shape}
        for name, shape in shapes.items():
            array = getattr(truth, name)
            if array.shape != shape or array.dtype != np.float64:
                expected = f"an array of shape {shape} in float64 for placement {self.placement!r}"
                raise InputError(f"truth.{name}", expected=expected, got=(array.shape, str(array.dtype)))
        _, jacobian = model.value_and_jacobian(truth.vector()[None], self.design)
        values = np.linalg.svd(jacobian[0], compute_uv=False)
        rank = int(np.sum(values > 1e-10 * values[0]))
        if rank < model.rank:
            expected = f"a design that identifies {model.rank} directions of the parameters at the truth"
            raise InputError("design", expected=expected, got=rank, hint="Add different sequences, or move the truth.")

    def _warn_of_gates(self, truth: ExpertTruth) -> None:
        distances = np.linalg.norm(truth.gate[:, None] - truth.gate[None], axis=-1)
        nearest = float(np.min(distances[~np.eye(self.k_star, dtype=bool)], initial=np.inf))
        if nearest < _NEAR_GATES:
            warnings.warn(
                f"Two true gates are at a distance of {nearest:.3g}: they hardly distinguish their experts, and the "
                "errors stay large up to very large n.",
                stacklevel=4,
            )
        smallest = float(np.min(np.linalg.norm(truth.gate, axis=-1)))
        if self.k > self.k_star and self.radius > smallest / 2:
            warnings.warn(
                "With k > k_star an expert u at the gate θ has an exact duplicate, since σ(z) + σ(−z) = 1: 2u at 0 and "
                f"−u at −θ. Starts of radius {self.radius:.3g} can reach it from gates of norm {smallest:.3g}; use a "
                "smaller radius.",
                stacklevel=4,
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RateData:
    """Measurements of an experiment for the best start of each replicate."""

    experiment: ExpertExperiment
    ns: tuple[int, ...]
    errors: dict[str, Floats]
    """By name in `METRICS`, (sizes, replicates)."""
    converged: Any
    """(sizes, replicates, starts) bool"""
    start_spread: dict[str, Floats]
    """(sizes, replicates) by metric: largest distance of an equally good fit from the best; nan if there is none."""
    start_error: Floats
    """(sizes, replicates): expert error of the winning start before fitting."""


def run_experiment(
    experiment: ExpertExperiment,
    *,
    loss: LossKind = "vector_mass",
    tolerance: float = 1e-7,
    max_steps: int = 400,
    progress: Callable[[int, int], None] | None = None,
) -> RateData:
    """Draw data, fit and measure at every sample size.

    `loss` is a kind of `voronoi_loss`, and the tolerance is that of `fit_batch`. `progress` is called with the number
    of finished sizes and the number of all sizes.
    """
    rows: list[dict[str, Any]] = []
    for index, n in enumerate(experiment.ns):
        rng = np.random.default_rng([experiment.seed, index])
        cells = draw_cells(experiment, n, rng)
        starts = _starts(experiment, rng)
        repeated = CellData(
            means=np.repeat(cells.means, experiment.starts, axis=0),
            weights=np.repeat(cells.weights, experiment.starts, axis=0),
            precision=np.repeat(cells.precision, experiment.starts),
        )
        fits = fit_batch(
            experiment.model,
            experiment.design,
            repeated,
            starts,
            tolerance=tolerance,
            patience=2 if experiment.k == experiment.k_star else _VALLEY_PATIENCE,
            max_steps=max_steps,
        )
        rows.append(_measure(experiment, fits, starts, loss))
        if progress is not None:
            progress(index + 1, len(experiment.ns))
    return RateData(
        experiment=experiment,
        ns=experiment.ns,
        errors={name: np.array([row[name] for row in rows]) for name in METRICS},
        converged=np.array([row["converged"] for row in rows]),
        start_spread={name: np.array([row["spread"][name] for row in rows]) for name in rows[0]["spread"]},
        start_error=np.array([row["start"] for row in rows]),
    )


def draw_cells(experiment: ExpertExperiment, n: int, rng: np.random.Generator) -> CellData:
    """Draw each replicate's share and mean of samples at each design point; the cost does not grow with n."""
    num_points = len(experiment.design.points)
    truth = experiment.true_model.value(experiment.true_parameters.vector()[None], experiment.design)
    counts = rng.multinomial(n, np.full(num_points, 1 / num_points), size=experiment.replicates)
    noise = experiment.noise * rng.standard_normal(counts.shape) / np.sqrt(np.maximum(counts, 1))
    precision = np.full(experiment.replicates, n / experiment.noise**2)
    return CellData(means=truth + noise, weights=counts / n, precision=precision)


def _starts(experiment: ExpertExperiment, rng: np.random.Generator) -> Floats:
    """Return starts (replicates · starts, P): the truth with surplus experts split off, plus noise."""
    total = experiment.replicates * experiment.starts
    centers = np.stack([_split_truth(experiment, rng) for _ in range(total)])
    return centers + experiment.radius * rng.standard_normal(centers.shape)


def _split_truth(experiment: ExpertExperiment, rng: np.random.Generator) -> Floats:
    """Return the truth as k experts: each surplus expert shares the mass and the gate of a true one."""
    truth = experiment.true_parameters
    owners = np.concatenate(
        [np.arange(experiment.k_star), rng.integers(experiment.k_star, size=experiment.k - experiment.k_star)]
    )
    experts = truth.experts[owners] / np.bincount(owners)[owners][:, None]
    gate = truth.gate[owners] if experiment.model.gated_experts else truth.gate
    return ExpertTruth(scores=truth.scores, experts=experts, gate=gate).vector()


def _measure(experiment: ExpertExperiment, fits: Fits, starts: Floats, loss: LossKind) -> dict[str, Any]:
    """Measure the errors of each replicate's best fit, and its distance from equally good fits."""
    shape = (experiment.replicates, experiment.starts)
    objective = fits.objective.reshape(shape)
    best = np.argmin(objective, axis=1)
    chosen = np.arange(experiment.replicates) * experiment.starts + best
    truth = _atoms(experiment.true_model, experiment.true_parameters.vector())
    losses = [voronoi_loss(_atoms(experiment.model, row), truth, kind=loss) for row in fits.parameters]
    best_losses = [losses[int(row)] for row in chosen]
    equal = objective - objective.min(axis=1, keepdims=True) < _INDISTINGUISHABLE
    scores = experiment.model.split(fits.parameters)[0]
    values = experiment.model.value(fits.parameters, experiment.design)
    true_values = experiment.true_model.value(experiment.true_parameters.vector()[None], experiment.design)
    merged = np.stack([found.merged_masses for found in losses])
    distances = {
        "expert": np.sum(np.linalg.norm(_from_best(merged, chosen), axis=-1), axis=-1),
        "regression": np.sqrt(np.mean(_from_best(values, chosen) ** 2, axis=-1)),
        "scores": np.linalg.norm(_from_best(scores, chosen), axis=(-2, -1)),
    }
    return {
        "expert": [found.merged for found in best_losses],
        "covered": [found.covered for found in best_losses],
        "over": [found.over for found in best_losses],
        "total": [found.total for found in best_losses],
        "regression": np.sqrt(np.mean((values[chosen] - true_values) ** 2, axis=1)),
        "scores": np.linalg.norm(scores[chosen] - experiment.true_parameters.scores, axis=(1, 2)),
        "converged": fits.converged.reshape(shape),
        "spread": {name: _largest(distance.reshape(shape), equal) for name, distance in distances.items()},
        "start": [voronoi_loss(_atoms(experiment.model, starts[row]), truth, kind=loss).merged for row in chosen],
    }


def _from_best(found: Floats, chosen: Any) -> Floats:
    """Return the difference of every fit from the best of its replicate, (replicates · starts, ...)."""
    return found - np.repeat(found[chosen], len(found) // len(chosen), axis=0)


def _largest(distance: Floats, equal: Any) -> Floats:
    """Return the largest distance over the equally good fits; nan if there is only the best."""
    return np.where(equal.sum(axis=1) > 1, np.max(np.where(equal, distance, 0.0), axis=1), np.nan)


def _atoms(model: ExpertModel, parameters: Floats) -> Atoms:
    _, experts, gate = model.split(parameters)
    return Atoms(masses=experts, locations=gate if model.gated_experts else None)
