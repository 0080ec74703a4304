"""Errors and the warning of a measurement of curvature."""

from __future__ import annotations


class GeometryError(ValueError):
    """A point, plane or function that has no curvature to measure.

    Where tangent vectors are not independent, `rank` and `smallest_singular_value` say how badly; elsewhere they are
    None.
    """

    def __init__(self, message: str, *, rank: int | None = None, smallest_singular_value: float | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.smallest_singular_value = smallest_singular_value


class PrecisionWarning(UserWarning):
    """Curvature is a small difference of large second derivatives, here taken in float32."""
