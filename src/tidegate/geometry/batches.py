"""Batches of points and directions: validated, broadcast together, and split into chunks that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
"""The default memory budget of one call."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Points with their directions as flat rows, and the framework that differentiates at them."""

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
        """Make a batch of points (..., n) and named directions (..., n), arrays like x or of NumPy."""
        if not callable(f):
            raise TypeError(f"f must be a function of one point, got {type(f).__name__}.")
        if max_bytes < 1:
            raise InputError("max_bytes", expected="at least 1", got=max_bytes)
        by, points = differentiator(x)
        if by.dtype.itemsize == 4:
            warn_of_single_precision()
        arrays: dict[str, Numbers] = {"x": points}
        for name, given in directions.items():
            is_numpy = isinstance(given, np.ndarray)
            arrays[name] = np.asarray(given, np.float64) if is_numpy else differentiator(given, name=name)[1]
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

    @cached_property
    def _footprint(self) -> tuple[int, int]:
        return self.by.footprint(self.f, self.points[0])

    @property
    def _bytes_of_one(self) -> int:
        """The memory of one evaluation of f, twice because of the product rule."""
        return 2 * (self._footprint[0] + self.points[0].nbytes)

    def chunks(self, *, first: int = 0, second: int = 0) -> Iterator[slice]:
        """Return slices of rows that fit the budget, each with so many first and second derivatives.

        A first derivative takes as much memory as an evaluation of f, a second one three times as much. A chunk has at
        least one row, which may exceed the budget.
        """
        count = step = len(self.points)
        if count > 1:
            step = max(1, self.max_bytes // (self._bytes_of_one * (1 + first + 3 * second)))
        return (slice(start, start + step) for start in range(0, count, step))

    def first(self, rows: slice, directions: Numbers) -> tuple[Numbers, float]:
        """Return Df along directions (rows, k, n) in float64, and the epsilon of its original dtype."""
        found = self.by.first(self.f, self.points[rows], directions)
        require_finite("The first derivative", found)
        return found.astype(np.float64, copy=False), float(np.finfo(found.dtype).eps)

    def second(self, rows: slice, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers, float]:
        """Return Df along `left` and D²f along both, (rows, k, n), in float64, and the epsilon of their dtype."""
        first, second = self.by.second(self.f, self.points[rows], left, right)
        require_finite("The first derivative", first)
        require_finite("The second derivative", second)
        epsilon = float(np.finfo(first.dtype).eps)
        return first.astype(np.float64, copy=False), second.astype(np.float64, copy=False), epsilon

    def jacobian(self, rows: slice) -> tuple[Numbers, float]:
        """Return Df along every coordinate, (rows, n, N), in blocks that fit the budget, and the epsilon of its dtype.

        Raises:
            GeometryError: If the Jacobian of one point exceeds the budget.
        """
        count, size = len(self.points[rows]), self.dimension
        needed = 8 * size * self._footprint[1]
        if needed > self.max_bytes:
            raise GeometryError(
                f"The Jacobian of one point takes {needed:,} bytes and max_bytes is {self.max_bytes:,}. Raise it, or "
                "measure slices with sectional_curvature(..., tangent='plane'), which needs no Jacobian."
            )
        step = min(size, max(1, self.max_bytes // (self._bytes_of_one * count) - 1))
        blocks: list[Numbers] = []
        epsilon = 0.0
        for start in range(0, size, step):
            axes = np.eye(min(step, size - start), size, start)
            block, epsilon = self.first(rows, np.broadcast_to(axes, (count, *axes.shape)))
            blocks.append(block)
        return np.concatenate(blocks, axis=1), epsilon

    def result(self, parts: list[Numbers]) -> Array:
        """Join the parts of all chunks, in the batch's shape and as x's kind of array."""
        joined = np.concatenate(parts)
        return self.by.restore(joined.reshape((*self.shape, *joined.shape[1:])))
