"""The Fisher–Rao metric of outputs read as distributions: Gaussians with a fixed covariance, or categorical."""

from __future__ import annotations

import numpy as np

from tidegate.geometry.batches import MAX_BYTES, Batch
from tidegate.geometry.covariance import Whitening
from tidegate.geometry.differentiation import Function, Numbers
from tidegate.tensors.namespace import Array, namespace_of


def fisher_rao_metric(
    f: Function, x: Array, *, covariance: Array | float | None = None, max_bytes: int = MAX_BYTES
) -> Array:
    r"""Return the pullback metric $g = J^T \Sigma^{-1} J$.

    f's outputs are read as means of Gaussians of covariance $\Sigma$. It may be singular: a metric of lower rank is
    returned as it is.

    Args:
        f: Takes one point (n,) and returns one array, which is flattened.
        x: (..., n), of PyTorch or JAX
        covariance: None for the identity, a number, a vector of variances (N,) or a matrix (N, N)
        max_bytes: Working memory to stay within, as far as one point allows.

    Returns:
        (..., n, n)
    """
    whitening = Whitening.of(covariance)
    batch = Batch.of(f, x, {}, max_bytes)
    parts: list[Numbers] = []
    for rows in batch.chunks(first=batch.dimension):
        jacobian = whitening.whiten(jacobian_rows(batch, rows)[0])
        parts.append(jacobian @ np.swapaxes(jacobian, -1, -2))
    return batch.result(parts)


def categorical_chart(f: Function) -> Function:
    r"""Return the map $2\sqrt{p}$ for a map f to probabilities (..., categories).

    Its plain metric is the Fisher–Rao metric of categories. All of the simplex becomes a part of the sphere of radius
    2, of curvature 1/4. A probability of 0 has no derivative there, and what reads it raises.
    """

    def chart(x: Array) -> Array:
        probabilities = f(x)
        return 2 * namespace_of(probabilities).sqrt(probabilities)

    return chart


def jacobian_rows(batch: Batch, rows: slice) -> tuple[Numbers, float]:
    """Return Df along every coordinate, (rows, n, N), taken in blocks that fit the budget, and the rounding unit."""
    count, size = len(batch.points[rows]), batch.dimension
    batch.require_room_for_jacobian()
    step = min(size, max(1, batch.max_bytes // (batch.bytes_of_one * count) - 1))
    blocks: list[Numbers] = []
    epsilon = 0.0
    for start in range(0, size, step):
        axes = np.eye(min(step, size - start), size, start)
        block, epsilon = batch.first(rows, np.broadcast_to(axes, (count, *axes.shape)))
        blocks.append(block)
    return np.concatenate(blocks, axis=1), epsilon
