"""Points and planes as given: checked, broadcast to one batch, and cut into chunks that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.differentiation import (
    Differentiator,
    Function,
    Numbers,
    differentiator,
    warn_of_single_precision,
)
from tidegate.geometry.errors import GeometryError
from tidegate.geometry.tangents import require_finite
from tidegate.tensors._checks import broadcast_batches
from tidegate.tensors.namespace import Array

MAX_BYTES = 2**30
"""Working memory that one call aims to stay within, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Points with their directions as flat rows, and the framework that they came from."""

    f: Function
    by: Differentiator
    shape: tuple[int, ...]
    """The leading axes that the points and directions broadcast to."""
    points: Numbers
    """(P, n)"""
    directions: tuple[Numbers, ...]
    """Each (P, n)."""
    max_bytes: int

    @classmethod
    def of(cls, f: Function, x: Array, directions: dict[str, Array], max_bytes: int) -> Batch:
        """Make a batch of a point or points (..., n) and named directions (..., n), of x's kind or NumPy's."""
        if not callable(f):
            raise TypeError(f"f must be a function of one point, got {type(f).__name__}.")
        if max_bytes < 1:
            raise InputError("max_bytes", expected="at least 1", got=max_bytes)
        by, points = differentiator(x)
        if by.single_precision:
            warn_of_single_precision()
        arrays = {"x": points} | {name: _direction(name, given) for name, given in directions.items()}
        for name, array in arrays.items():
            if array.ndim < 1 or array.shape[-1] != points.shape[-1]:
                raise InputError(name, expected="of shape (..., coordinates), as many as x has", got=array.shape)
            if not array.size:
                raise InputError(name, expected="at least one point and one coordinate", got=array.shape)
            if not np.isfinite(array).all():
                raise GeometryError(f"{name} has NaN or infinite entries. Leave those points out.")
        shape = broadcast_batches(**{name: array.shape[:-1] for name, array in arrays.items()})
        together = (np.broadcast_to(array, (*shape, array.shape[-1])) for array in arrays.values())
        first, *rest = (np.ascontiguousarray(array).reshape(-1, array.shape[-1]) for array in together)
        return cls(f=f, by=by, shape=shape, points=first, directions=tuple(rest), max_bytes=max_bytes)

    @property
    def dimension(self) -> int:
        """Number of coordinates of a point."""
        return self.points.shape[-1]

    @property
    def bytes_of_one(self) -> int:
        """Memory to set aside for one copy of f's intermediates, twice over for the terms of the product rule."""
        return 2 * (self._footprint[0] + self.points[0].nbytes)

    @cached_property
    def _footprint(self) -> tuple[int, int]:
        return self.by.footprint(self.f, self.points[0])

    def require_room_for_jacobian(self) -> None:
        """Raise GeometryError if the Jacobian of one point alone would exceed the budget."""
        needed = 8 * self.dimension * self._footprint[1]
        if needed > self.max_bytes:
            raise GeometryError(
                f"The Jacobian of one point takes {needed:,} bytes and max_bytes is {self.max_bytes:,}. Raise it, or "
                "measure slices with sectional_curvature(..., tangent='plane'), which needs no Jacobian."
            )

    def chunks(self, *, first: int = 0, second: int = 0) -> Iterator[slice]:
        """Return rows that fit the budget together, each with so many first and second derivatives.

        A first derivative carries one more copy of f's intermediates, a second one three. A single row may exceed the
        budget: it is the least that can be done.
        """
        count = len(self.points)
        step = count
        if count > 1:
            step = max(1, self.max_bytes // (self.bytes_of_one * (1 + first + 3 * second)))
        return (slice(start, start + step) for start in range(0, count, step))

    def first(self, rows: slice, directions: Numbers) -> tuple[Numbers, float]:
        """Return Df along directions (rows, k, n) in float64, and the rounding unit of its original dtype."""
        found = self.by.first(self.f, self.points[rows], directions)
        return _require_finite_float64("The first derivative", found), float(np.finfo(found.dtype).eps)

    def second(self, rows: slice, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers, float]:
        """Return Df along `left` and D²f along both, (rows, k, n), in float64, and the rounding unit."""
        first, second = self.by.second(self.f, self.points[rows], left, right)
        epsilon = float(np.finfo(first.dtype).eps)
        first = _require_finite_float64("The first derivative", first)
        return first, _require_finite_float64("The second derivative", second), epsilon

    def result(self, parts: list[Numbers]) -> Array:
        """Join the parts of all chunks, in the batch's shape and as the caller's kind of array."""
        joined = np.concatenate(parts)
        return self.by.restore(joined.reshape((*self.shape, *joined.shape[1:])))


def _direction(name: str, given: Array) -> Numbers:
    if isinstance(given, np.ndarray):
        return cast("Numbers", given).astype(np.float64)
    return differentiator(given, name=name)[1]


def _require_finite_float64(what: str, numbers: Numbers) -> Numbers:
    require_finite(what, numbers)
    return numbers.astype(np.float64, copy=False)
