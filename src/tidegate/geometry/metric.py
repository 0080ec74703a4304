"""The Fisher–Rao metric of outputs read as distributions: Gaussians with a fixed covariance, or categorical."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.batches import MAX_BYTES, Batch
from tidegate.geometry.differentiation import Function, Numbers
from tidegate.geometry.errors import GeometryError
from tidegate.tensors.namespace import Array, namespace_of


def fisher_rao_metric(
    f: Function, x: Array, *, covariance: Array | float | None = None, max_bytes: int = MAX_BYTES
) -> Array:
    r"""Return the pullback metric $g = J^T \Sigma^{-1} J$.

    f's outputs are the means of Gaussians with covariance $\Sigma$. The metric is returned even if it is singular.

    Args:
        f: Takes one point (n,) and returns one array, which is flattened.
        x: (..., n), of PyTorch or JAX
        covariance: None for the identity, a number, a vector of variances (N,) or a matrix (N, N)
        max_bytes: Memory budget, which a single point may exceed.

    Returns:
        (..., n, n)
    """
    whitening = Whitening.of(covariance)
    batch = Batch.of(f, x, {}, max_bytes)
    parts: list[Numbers] = []
    for rows in batch.chunks(first=batch.dimension):
        jacobian = whitening.whiten(batch.jacobian(rows)[0])
        parts.append(jacobian @ np.swapaxes(jacobian, -1, -2))
    return batch.result(parts)


def categorical_chart(f: Function) -> Function:
    r"""Return the map $2\sqrt{p}$ for a map f to probabilities (..., categories).

    Its Euclidean metric is the Fisher–Rao metric of categorical distributions. The image of the whole simplex is a part
    of the sphere of radius 2, with curvature 1/4. At a probability of 0 it has no derivative, and measuring raises
    GeometryError.
    """

    def chart(x: Array) -> Array:
        probabilities = f(x)
        return 2 * namespace_of(probabilities).sqrt(probabilities)

    return chart


@dataclass(frozen=True)
class Whitening:
    r"""The root $L$ of a covariance $\Sigma = L L^T$: lengths of $L^{-1} y$ are those of y under $\Sigma^{-1}$."""

    root: Numbers | None
    """None for the identity; otherwise a number, a diagonal or a lower triangle."""

    @classmethod
    def of(cls, covariance: Any) -> Whitening:
        """Take None (the identity), a positive number, a vector of variances or a positive definite matrix.

        Raises:
            GeometryError: If a matrix is not symmetric, or has an eigenvalue that is not above rounding.
        """
        if covariance is None:
            return cls(None)
        covariance = covariance.detach().cpu() if hasattr(covariance, "detach") else covariance
        numbers = np.asarray(covariance, dtype=np.float64)
        if numbers.ndim > 2 or (numbers.ndim == 2 and numbers.shape[0] != numbers.shape[1]) or not numbers.size:
            expected = "None, a number, a vector of variances or a square matrix"
            raise InputError("covariance", expected=expected, got=numbers.shape)
        if not np.isfinite(numbers).all():
            raise GeometryError("covariance has NaN or infinite entries. Give finite variances.")
        if numbers.ndim < 2:
            smallest, least = float(numbers.min()), 0.0
        else:
            scale = np.abs(numbers).max()
            if np.abs(numbers - numbers.T).max() > 1e-10 * scale:
                raise GeometryError("covariance is not symmetric. Use (covariance + covariance.T) / 2.")
            smallest, least = np.linalg.eigvalsh(numbers)[0], len(numbers) * np.finfo(np.float64).eps * scale
        if smallest <= least:
            raise GeometryError(
                f"covariance is not positive definite: its smallest eigenvalue is {smallest:.3g}. Add a positive "
                "number to its diagonal, or leave out constant outputs."
            )
        return cls(np.sqrt(numbers) if numbers.ndim < 2 else np.linalg.cholesky((numbers + numbers.T) / 2))

    def whiten(self, vectors: Numbers) -> Numbers:
        """Return L⁻¹ along the last axis, (..., N)."""
        if self.root is None:
            return vectors
        width = vectors.shape[-1]
        if self.root.ndim and self.root.shape[-1] != width:
            raise InputError("covariance", expected=f"of one row for each of f's {width} outputs", got=len(self.root))
        if self.root.ndim < 2:
            return vectors / self.root
        return np.linalg.solve(self.root, vectors.reshape(-1, width).T).T.reshape(vectors.shape)

    def restore(self, vectors: Numbers) -> Numbers:
        """Return L along the last axis, (..., N)."""
        if self.root is None:
            return vectors
        return vectors * self.root if self.root.ndim < 2 else vectors @ self.root.T
