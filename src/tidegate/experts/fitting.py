r"""Many least-squares fits at once: Levenberg–Marquardt in float64, each fit with a damping of its own.

The objective is in units of twice the log-likelihood, $n \sum_m w_m (\bar y_m - f_m)^2 / \sigma^2$, and so is the
tolerance: a step that gains less than a small number is below what the data can tell at any n.
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
"""Fits taken at once, so that their Jacobians stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellData:
    """Samples on a design of finite support, reduced without loss: each point's share of them and their mean."""

    means: Floats
    """(b, M); a point without samples may hold any finite number"""
    weights: Floats
    """(b, M): share of the samples at each point"""
    precision: Floats
    """(b,): number of samples over the noise's variance"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fits:
    """Where each fit ended."""

    parameters: Floats
    """(b, P)"""
    objective: Floats
    """(b,): in units of twice the log-likelihood"""
    converged: Any
    """(b,) bool: ended by the tolerance, not by the number of steps"""
    steps: Any
    """(b,): how many steps were tried"""


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
        model: What is fitted.
        design: Points of the data.
        data: Shares and means, a row for each fit.
        starts: (b, P), float64.
        tolerance: What a step must gain, by its own forecast too, to count.
        patience: Steps in a row that gain less, after which a fit ends; a flat valley needs more.
        max_steps: After which a fit ends without having converged.
        free: (P,) bool, the parameters that may move; None moves them all.
    """
    if starts.dtype != np.float64:
        raise TypeError(f"starts must be float64; got {starts.dtype}. Single precision would become the errors' floor.")
    moving = np.ones(model.num_parameters, dtype=bool) if free is None else np.asarray(free, dtype=bool)
    state = _State(model, design, data, starts.copy(), moving)
    for _ in range(max_steps):
        active = np.flatnonzero(state.small < patience)
        if not len(active):
            break
        state.step(active, tolerance)
    return Fits(
        parameters=state.parameters,
        objective=state.objective,
        converged=state.small >= patience,
        steps=state.steps,
    )


class _State:
    """All fits, between steps: where they are, and the quadratic model of the objective there."""

    def __init__(self, model: ExpertModel, design: Design, data: CellData, parameters: Floats, moving: Any) -> None:
        self.model, self.design, self.data, self.moving = model, design, data, moving
        self.parameters = parameters
        self.damping = np.full(len(parameters), _FIRST_DAMPING)
        self.small = np.zeros(len(parameters), dtype=int)
        self.steps = np.zeros(len(parameters), dtype=int)
        self.objective, self.slope, self.curvature = self._quadratic(np.arange(len(parameters)), parameters)

    def step(self, active: Any, tolerance: float) -> None:
        """One trial step of the active fits: taken where it lowers the objective, damped more where not."""
        slope, curvature = self.slope[active], self.curvature[active]
        diagonal = np.einsum("bpp->bp", curvature)
        # A direction that moves nothing is held by a unit weight.
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
        """Objective (b,), half its falling slope (b, P) and half its curvature (b, P, P), a few fits at a time."""
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
