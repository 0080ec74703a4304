r"""Fit many least-squares problems at once: Levenberg–Marquardt in float64 with separate damping for each fit.

Objective and tolerance are in units of twice the log-likelihood, $n \sum_m w_m (\bar y_m - f_m)^2 / \sigma^2$: a step
that gains much less than 1 is below the resolution of the data at any n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.experts.layers import Floats
from tidegate.experts.models import Design, ExpertModel

_FIRST_DAMPING = 1e-3
_LEAST_DAMPING = 1e-9
_MOST_DAMPING = 1e12
_RELAX, _TIGHTEN = 0.1, 5.0
_BLOCK = 32
"""Fits per block, so that their Jacobians fit into the CPU cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellData:
    """Sufficient statistics of samples on a design of finite support: share and mean at each point."""

    means: Floats
    """(b, M); any finite number at points without samples"""
    weights: Floats
    """(b, M): share of the samples at each point"""
    precision: Floats
    """(b,): number of samples over the variance of the noise"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fits:
    """Results of the fits."""

    parameters: Floats
    """(b, P)"""
    objective: Floats
    """(b,): in units of twice the log-likelihood"""
    converged: Any
    """(b,) bool: ended by the tolerance, not by the step limit"""
    steps: Any
    """(b,): number of trial steps"""


def fit_batch(
    model: ExpertModel,
    design: Design,
    data: CellData,
    starts: Floats,
    *,
    tolerance: float = 1e-7,
    patience: int = 2,
    max_steps: int = 400,
    free: Any | None = None,
) -> Fits:
    """Fit each row of the data from its own start.

    Args:
        model: The fitted model.
        design: Points of the data.
        data: Shares and means, one row per fit.
        starts: (b, P), float64.
        tolerance: Minimum gain of a step, predicted or actual.
        patience: Consecutive steps below the tolerance that end a fit; flat valleys need more.
        max_steps: Maximum number of steps; a fit that reaches it has not converged.
        free: (P,) bool, the parameters to fit; None for all.
    """
    if starts.dtype != np.float64:
        raise TypeError(f"starts must be float64; got {starts.dtype}. Single precision would limit the errors.")
    moving = np.ones(model.num_parameters, dtype=bool) if free is None else np.asarray(free, dtype=bool)
    state = _State(model, design, data, starts.copy(), moving)
    for _ in range(max_steps):
        active = np.flatnonzero(state.small < patience)
        if not len(active):
            break
        state.step(active, tolerance)
    return Fits(
        parameters=state.parameters, objective=state.objective, converged=state.small >= patience, steps=state.steps
    )


class _State:
    """The current parameters of all fits, with the quadratic model of the objective."""

    def __init__(self, model: ExpertModel, design: Design, data: CellData, parameters: Floats, moving: Any) -> None:
        self.model, self.design, self.data, self.moving = model, design, data, moving
        self.parameters = parameters
        self.damping = np.full(len(parameters), _FIRST_DAMPING)
        self.small = np.zeros(len(parameters), dtype=int)
        self.steps = np.zeros(len(parameters), dtype=int)
        self.objective, self.slope, self.curvature = self._quadratic(np.arange(len(parameters)), parameters)

    def step(self, active: Any, tolerance: float) -> None:
        """Try one step of the active fits; accept it if the objective falls, otherwise increase the damping."""
        slope, curvature = self.slope[active], self.curvature[active]
        diagonal = np.einsum("bpp->bp", curvature)
        # Unit damping fixes directions without curvature.
        hold = np.where(diagonal > 0, self.damping[active, None] * diagonal, 1.0)
        move = np.linalg.solve(curvature + hold[..., None] * np.eye(hold.shape[1]), slope[..., None])[..., 0]
        foreseen = np.sum(move * (slope + hold * move), axis=1)
        trial = self.parameters[active] + move
        with np.errstate(over="ignore", invalid="ignore"):
            reached, slope, curvature = self._quadratic(active, trial)
        gain = self.objective[active] - reached
        taken = gain >= 0
        moved = active[taken]
        self.parameters[moved], self.objective[moved] = trial[taken], reached[taken]
        self.slope[moved], self.curvature[moved] = slope[taken], curvature[taken]
        damping = self.damping[active] * np.where(taken, _RELAX, _TIGHTEN)
        self.damping[active] = np.clip(damping, _LEAST_DAMPING, _MOST_DAMPING)
        small = (foreseen < tolerance) & ~(gain >= tolerance)
        self.small[active] = np.where(small, self.small[active] + 1, np.where(taken, 0, self.small[active]))
        self.steps[active] += 1

    def _quadratic(self, rows: Any, parameters: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the objective (b,), half its negative gradient (b, P) and half its Hessian (b, P, P)."""
        size = self.model.num_parameters
        objective, slope = np.empty(len(rows)), np.empty((len(rows), size))
        curvature = np.empty((len(rows), size, size))
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            chosen = rows[block]
            values, jacobian = self.model.value_and_jacobian(parameters[block], self.design)
            if not self.moving.all():
                jacobian[:, ~self.moving] = 0
            weights = self.data.weights[chosen] * self.data.precision[chosen, None]
            residual = self.data.means[chosen] - values
            weighted = jacobian * weights[:, None, :]
            objective[block] = np.sum(weights * residual**2, axis=1)
            slope[block] = (weighted @ residual[..., None])[..., 0]
            curvature[block] = weighted @ np.swapaxes(jacobian, 1, 2)
        return objective, slope, curvature
