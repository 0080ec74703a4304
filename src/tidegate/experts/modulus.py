"""Measure identifiability without noise: the smallest change of the function by a given error of an expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate._validation import InputError
from tidegate.experts.fitting import CellData, fit_batch
from tidegate.experts.layers import Floats
from tidegate.experts.models import Design, ExpertModel, ExpertTruth, default_design

_ZERO = 1e-12
_TOLERANCE = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Modulus:
    """The smallest change of the function by the error of an expert."""

    radii: Floats
    values: Floats
    """Root mean square over the design for each radius; 0 up to rounding error if the function does not change."""
    exponent: float
    """r in value ∝ radius^r, for a rate n^(−1/(2r)); nan if not identified."""

    @property
    def identified(self) -> bool:
        """Return whether an error of an expert changes the function at every radius."""
        return bool(np.all(self.values > _ZERO))


def profile_modulus(
    model: ExpertModel,
    truth: ExpertTruth,
    radii: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3),
    *,
    design: Design | None = None,
    num_directions: int = 8,
) -> Modulus:
    """Fix one expert at a distance from its true value, fit everything else, and return the remaining change.

    This is the minimum over all experts and over directions of the displacement (evenly around the circle for width 2,
    random otherwise). Fits start at the truth, so that it is the modulus near it.

    Args:
        model: A model with as many experts as the truth.
        truth: The start of the fits.
        radii: Distances of the fixed expert from its true value.
        design: None for the default design of the model's width.
        num_directions: Directions in which each expert is displaced.
    """
    if len(truth.experts) != model.k:
        raise InputError("model.k", expected=f"the number of experts in truth, {len(truth.experts)}", got=model.k)
    distances = np.asarray(radii, dtype=np.float64)
    if distances.ndim != 1 or len(distances) < 2 or np.any(distances <= 0):
        raise InputError("radii", expected="two or more positive numbers", got=radii)
    support = default_design(width=model.width) if design is None else design
    values = [_least_change(model, truth, expert, distances, support, num_directions) for expert in range(model.k)]
    least = np.min(values, axis=0)
    exponent = float("nan")
    if np.all(least > _ZERO):
        steps = np.log(distances) - np.mean(np.log(distances))
        exponent = float(np.sum(steps * np.log(least)) / np.sum(steps**2))
    return Modulus(radii=distances, values=least, exponent=exponent)


def _least_change(
    model: ExpertModel, truth: ExpertTruth, expert: int, radii: Floats, design: Design, num_directions: int
) -> Floats:
    """Return the smallest change over directions of displacing one expert, (radii,)."""
    directions = _directions(model.width, num_directions)
    held = slice(model.width**2 + expert * model.width, model.width**2 + (expert + 1) * model.width)
    starts = np.tile(truth.vector(), (len(radii) * len(directions), 1))
    starts[:, held] += (radii[:, None, None] * directions).reshape(-1, model.width)
    free = np.ones(model.num_parameters, dtype=bool)
    free[held] = False
    num_points = len(design.points)
    data = CellData(
        means=np.tile(model.value(truth.vector()[None], design), (len(starts), 1)),
        weights=np.full((len(starts), num_points), 1 / num_points),
        precision=np.ones(len(starts)),
    )
    fits = fit_batch(model, design, data, starts, tolerance=_TOLERANCE, free=free)
    return np.sqrt(fits.objective.reshape(len(radii), len(directions)).min(axis=1))


def _directions(width: int, number: int) -> Floats:
    if width == 2:
        angles = 2 * np.pi * np.arange(number) / number
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    drawn = np.random.default_rng(0).standard_normal((number, width))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
