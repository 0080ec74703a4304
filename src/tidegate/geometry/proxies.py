r"""A finite-difference stand-in for curvature, and how to find out what it is worth.

The second-difference ratio of a direction d, $r(\epsilon) = |f(x + \epsilon d) - 2 f(x) + f(x - \epsilon d)| \,/\,
|f(x + \epsilon d) - f(x - \epsilon d)|$, grows in proportion to the step; over the step it tends to $|D^2 f(d,d)| / 2
|Df\,d|$. That says how fast a path changes its velocity, in direction or in speed: it depends on the coordinates, it is
never negative, and a surface that is flat can have any value of it.
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
    r"""Return the second-difference ratio over the step, $r(\epsilon) / \epsilon$.

    For a small step it is near $|D^2 f(d,d)| / 2|Df\,d|$.

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
    """How the plain ratio, not divided by the step, grows with the step."""

    steps: tuple[float, ...]
    ratios: Numbers
    """(steps,)"""
    slope: float
    """Of log ratio over log step: 1 where the second derivative rules, 0 at a kink, −1 in rounding noise."""

    @property
    def linear(self) -> bool:
        """Whether the slope is within 0.05 of 1, so that the proxy measures a second derivative at all."""
        return abs(self.slope - 1) < 0.05


def step_linearity(
    f: Function, x: Array, direction: Array, *, steps: Sequence[float] = (1e-3, 2e-3, 4e-3, 8e-3)
) -> StepLinearity:
    """Check at one point (n,) that the ratio is proportional to the step.

    The slope is minus infinity, and `linear` False, if a second difference is exactly 0: there is nothing to measure.
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
    """The proxy beside the true curvature, plane by plane."""

    proxy: Numbers
    """(P,): the ratio over the step, its mean over the plane's two directions."""
    curvature: Numbers
    """(P,): the sectional curvature, with its sign."""
    flat: float

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of the proxy and |K|; None if either is the same everywhere."""
        if len(self.proxy) < 2 or np.ptp(self.proxy) == 0 or np.ptp(np.abs(self.curvature)) == 0:
            return None
        from scipy import stats

        return float(cast("Any", stats).spearmanr(self.proxy, np.abs(self.curvature)).statistic)

    @property
    def false_alarms(self) -> float:
        """Share of planes that the proxy takes for curved and that are flat."""
        return float(np.mean((self.proxy > self.flat) & (np.abs(self.curvature) <= self.flat)))

    @property
    def misses(self) -> float:
        """Share of planes that the proxy takes for flat and that are curved."""
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
    """Compare the proxy along u and v with the true curvature of the slice that they span.

    Args:
        f: The map.
        x: (..., n), of PyTorch or JAX
        u: (..., n)
        v: (..., n)
        step: Length of a step, in units of the direction.
        flat: The value at or below which the proxy, and |K|, count as 0.
        covariance: As in `sectional_curvature`.
    """
    curvature = sectional_curvature(f, x, u, v, covariance=covariance, tangent="plane")
    proxies = [second_difference_ratio(f, x, direction, step=step) for direction in (u, v)]
    one, other = (np.broadcast_to(differentiator(p)[1], curvature.shape).reshape(-1) for p in proxies)
    return Agreement(proxy=(one + other) / 2, curvature=differentiator(curvature)[1].reshape(-1), flat=flat)


def _ratios(batch: Batch, step: float) -> Numbers:
    """Return the second over the first difference at every row, (P,)."""
    if not step > 0:
        raise InputError("step", expected="above 0", got=step)
    return np.concatenate([_ratios_of(batch, rows, step) for rows in batch.chunks(first=1)])


def _ratios_of(batch: Batch, rows: slice, step: float) -> Numbers:
    points, direction = batch.points[rows], batch.directions[0][rows]
    behind, here, ahead = (
        batch.by.values(batch.f, points + sign * step * direction).astype(np.float64) for sign in (-1, 0, 1)
    )
    for values in (behind, here, ahead):
        require_finite("f", values)
    change = np.linalg.norm(ahead - behind, axis=-1)
    if not change.all():
        raise GeometryError(
            "f has the same value on both sides of x along the direction, which leaves nothing to compare with. Choose "
            "a direction that f changes along, or another step."
        )
    return np.linalg.norm(ahead - 2 * here + behind, axis=-1) / change
