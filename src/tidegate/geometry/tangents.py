"""Batched linear algebra of tangent spaces: rank, frames and normal parts. Vectors are rows: (..., k, N)."""

from __future__ import annotations

import numpy as np

from tidegate.geometry.differentiation import Numbers
from tidegate.geometry.errors import GeometryError


def require_finite(what: str, numbers: Numbers) -> None:
    """Raise GeometryError for the first point of a batch (P, ...) with a number that is not finite."""
    finite = np.isfinite(numbers)
    if not finite.all():
        first = int(np.argwhere(~finite)[0, 0])
        raise GeometryError(
            f"{what} has NaN or infinite entries at point {first} of {len(numbers)}. Look in f for a root or logarithm "
            "at 0, a division by 0, or a row in which everything is masked."
        )


def independent_frame(vectors: Numbers, *, epsilon: float, problem: str, remedy: str) -> tuple[Numbers, Numbers]:
    """Return an orthonormal basis (P, k, N) of vectors (P, k, N), and a lower triangle: `vectors = triangle @ basis`.

    Raises:
        GeometryError: If vectors span fewer than k dimensions; as in `numpy.linalg.matrix_rank`, a singular value
            counts if it is above max(k, N) epsilon times the largest.
    """
    q, r = np.linalg.qr(np.swapaxes(vectors, -1, -2))
    count, width = vectors.shape[-2:]
    singular = np.linalg.svd(r, compute_uv=False)
    singular = np.pad(singular, ((0, 0), (0, count - singular.shape[-1])))
    ranks = (singular > max(count, width) * epsilon * singular[:, :1]).sum(axis=1)
    if (ranks < count).any():
        first = int(np.argmax(ranks < count))
        rank, smallest = int(ranks[first]), float(singular[first, -1])
        raise GeometryError(
            f"{problem} at point {first} of {len(ranks)}: rank {rank} of {count}, smallest singular value "
            f"{smallest:.3g}, largest {singular[first, 0]:.3g}. {remedy}",
            rank=rank,
            smallest_singular_value=smallest,
        )
    return np.swapaxes(q, -1, -2), np.swapaxes(r, -1, -2)


def normal_part(vectors: Numbers, basis: Numbers) -> Numbers:
    """Return the part of vectors (P, m, N) that is orthogonal to an orthonormal basis (P, k, N)."""
    # The second pass removes rounding errors of the first.
    for _ in range(2):
        vectors = vectors - (vectors @ np.swapaxes(basis, -1, -2)) @ basis
    return vectors


def orthonormal_plane(u: Numbers, v: Numbers) -> Numbers:
    """Return an orthonormal basis (P, 2, n) of the plane of u and v, (P, n)."""
    pair = np.stack([u, v], axis=1)
    lengths = np.linalg.norm(pair, axis=-1, keepdims=True)
    return independent_frame(
        pair / np.where(lengths == 0, 1.0, lengths),
        epsilon=float(np.finfo(np.float64).eps),
        problem="u and v are parallel, or one is zero",
        remedy="Give independent directions.",
    )[0]
