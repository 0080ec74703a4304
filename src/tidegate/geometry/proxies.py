r"""A finite-difference proxy for curvature, and its agreement with the true curvature.

The second-difference ratio of a direction d, $r(\epsilon) = |f(x + \epsilon d) - 2 f(x) + f(x - \epsilon d)| \,/\,
|f(x + \epsilon d) - f(x - \epsilon d)|$, is proportional to the step; divided by the step it tends to $|D^2 f(d,d)| /
2 |Df\,d|$. It measures how fast the velocity of a path changes, in direction or speed. It depends on the coordinates,
is never negative, and can have any value on a flat surface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.batches import MAX_BYTES, Batch
from tidegate.geometry.curvature import sectional_curvature
from tidegate.geometry.differentiation import Function, Numbers, differentiator
from tidegate.geometry.errors import GeometryError
from tidegate.geometry.tangents import require_finite
from tidegate.tensors.namespace import Array


def second_difference_ratio(f: Function, x: Array, direction: Array, *, step: float = 1e-3) -> Array:
    r"""Return the second-difference ratio divided by the step, $r(\epsilon) / \epsilon$.

    For a small step it is close to $|D^2 f(d,d)| / 2|Df\,d|$.

    Args:
        f: The map.
        x: (..., n), of PyTorch or JAX
        direction: (..., n)
        step: Length of a step, in units of the direction.

    Returns:
        (...)

    Raises:
        GeometryError: If f does not change along the direction.
    """
    batch = Batch.of(f, x, {"direction": direction}, MAX_BYTES)
    return batch.result([_ratios(batch, step) / step])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLinearity:
    """The growth of the second-difference ratio with the step."""

    steps: tuple[float, ...]
    ratios: Numbers
    """(steps,)"""
    slope: float
    """Slope of log ratio over log step: 1 for a smooth map, 0 at a kink, −1 in rounding noise."""

    @property
    def linear(self) -> bool:
        """Whether the slope is within 0.05 of 1, so that the proxy measures a second derivative."""
        return abs(self.slope - 1) < 0.05


def step_linearity(
    f: Function, x: Array, direction: Array, *, steps: Sequence[float] = (1e-3, 2e-3, 4e-3, 8e-3)
) -> StepLinearity:
    """Check at one point (n,) that the ratio is proportional to the step.

    If a second difference is exactly 0, the slope is minus infinity and `linear` is False.
    """
    if len(set(steps)) < 2:
        raise InputError("steps", expected="at least two different lengths", got=tuple(steps))
    batch = Batch.of(f, x, {"direction": direction}, MAX_BYTES)
    if batch.shape:
        raise InputError("x", expected="one point (n,) with one direction (n,)", got=f"a batch of shape {batch.shape}")
    ratios = np.concatenate([_ratios(batch, step) for step in steps])
    slope = float(np.polyfit(np.log(steps), np.log(ratios), 1)[0]) if ratios.all() else -np.inf
    return StepLinearity(steps=tuple(steps), ratios=ratios, slope=slope)


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """The proxy and the true curvature of each plane."""

    proxy: Numbers
    """(P,): the second-difference ratio divided by the step, averaged over the plane's two directions."""
    curvature: Numbers
    """(P,): the sectional curvature, with its sign."""
    flat: float

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of the proxy and |K|; None if either is constant."""
        if len(self.proxy) < 2 or np.ptp(self.proxy) == 0 or np.ptp(np.abs(self.curvature)) == 0:
            return None
        from scipy import stats

        return float(cast("Any", stats).spearmanr(self.proxy, np.abs(self.curvature)).statistic)

    @property
    def false_alarms(self) -> float:
        """Fraction of planes that are flat and curved by the proxy."""
        return float(np.mean((self.proxy > self.flat) & (np.abs(self.curvature) <= self.flat)))

    @property
    def misses(self) -> float:
        """Fraction of planes that are curved and flat by the proxy."""
        return float(np.mean((self.proxy <= self.flat) & (np.abs(self.curvature) > self.flat)))


def agreement_with_curvature(
    f: Function,
    x: Array,
    u: Array,
    v: Array,
    *,
    step: float = 1e-3,
    flat: float = 1e-6,
    covariance: Array | float | None = None,
) -> Agreement:
    """Compare the proxy along u and v with the curvature of the slice that they span.

    Args:
        f: The map.
        x: (..., n), of PyTorch or JAX
        u: (..., n)
        v: (..., n)
        step: Length of a step, in units of the direction.
        flat: The largest value of the proxy and of |K| that counts as 0.
        covariance: As in `sectional_curvature`.
    """
    curvature = sectional_curvature(f, x, u, v, covariance=covariance, tangent="plane")
    proxies = [second_difference_ratio(f, x, direction, step=step) for direction in (u, v)]
    one, other = (np.broadcast_to(differentiator(p)[1], curvature.shape).reshape(-1) for p in proxies)
    return Agreement(proxy=(one + other) / 2, curvature=differentiator(curvature)[1].reshape(-1), flat=flat)


def _ratios(batch: Batch, step: float) -> Numbers:
    """Return the second difference divided by the first at every row, (P,)."""
    if not step > 0:
        raise InputError("step", expected="above 0", got=step)
    ratios: list[Numbers] = []
    for rows in batch.chunks(first=1):
        moves = (sign * step * batch.directions[0][rows] for sign in (-1, 0, 1))
        behind, here, ahead = (batch.by.values(batch.f, batch.points[rows] + move).astype(np.float64) for move in moves)
        for values in (behind, here, ahead):
            require_finite("f", values)
        change = np.linalg.norm(ahead - behind, axis=-1)
        if not change.all():
            raise GeometryError(
                "f has the same value on both sides of x along the direction, so that the ratio is not defined. Choose "
                "a direction that f depends on, or another step."
            )
        ratios.append(np.linalg.norm(ahead - 2 * here + behind, axis=-1) / change)
    return np.concatenate(ratios)
