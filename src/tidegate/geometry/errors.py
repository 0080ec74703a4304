"""Errors and warnings of curvature measurements."""

from __future__ import annotations


class GeometryError(ValueError):
    """A point, plane or function whose curvature is not defined.

    If tangent vectors are not independent, `rank` and `smallest_singular_value` are set; otherwise they are None.
    """

    def __init__(self, message: str, *, rank: int | None = None, smallest_singular_value: float | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.smallest_singular_value = smallest_singular_value


class PrecisionWarning(UserWarning):
    """Curvature, a small difference of large second derivatives, is computed in float32."""
