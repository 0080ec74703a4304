"""A covariance in any of its forms, and the change of units that turns its inner product into the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.geometry.differentiation import Numbers
from tidegate.geometry.errors import GeometryError
from tidegate.tensors.namespace import Array


@dataclass(frozen=True)
class Whitening:
    r"""The root $L$ of a covariance $\Sigma = L L^T$: in the units $L^{-1} y$ lengths are those of $\Sigma^{-1}$."""

    root: Numbers | None
    """None for the identity; no axes for a number, one for a diagonal, two for a lower triangle."""

    @classmethod
    def of(cls, covariance: Array | float | None) -> Whitening:
        """From None (the identity), a positive number, a vector of variances or a positive definite matrix.

        A matrix that is not symmetric, or has an eigenvalue that is not above rounding, is refused.
        """
        if covariance is None:
            return cls(None)
        numbers = _numbers(covariance)
        if not np.isfinite(numbers).all():
            raise GeometryError("covariance has NaN or infinite entries; give finite variances.")
        if numbers.ndim < 2:
            if not (numbers > 0).all():
                raise _not_positive(float(numbers.min()))
            return cls(np.sqrt(numbers))
        return cls(_triangle(numbers))

    def whiten(self, vectors: Numbers) -> Numbers:
        """L⁻¹ along the last axis, (..., N)."""
        if self.root is None:
            return vectors
        self._require_width(vectors.shape[-1])
        if self.root.ndim < 2:
            return vectors / self.root
        flat = vectors.reshape(-1, vectors.shape[-1])
        return np.linalg.solve(self.root, flat.T).T.reshape(vectors.shape)

    def restore(self, vectors: Numbers) -> Numbers:
        """L along the last axis, (..., N)."""
        if self.root is None:
            return vectors
        return vectors * self.root if self.root.ndim < 2 else vectors @ self.root.T

    def matrix(self, width: int) -> Numbers:
        """L⁻¹ as a matrix (N, N)."""
        return self.whiten(np.eye(width)).T

    def _require_width(self, width: int) -> None:
        assert self.root is not None
        if self.root.ndim and self.root.shape[-1] != width:
            raise ValueError(
                f"covariance must have one row for each of the {width} outputs of f; got {self.root.shape[-1]}."
            )


def _numbers(covariance: Any) -> Numbers:
    if hasattr(covariance, "detach"):
        covariance = covariance.detach().cpu()
    numbers = np.asarray(covariance, dtype=np.float64)
    if numbers.ndim > 2 or (numbers.ndim == 2 and numbers.shape[0] != numbers.shape[1]) or not numbers.size:
        raise ValueError(
            f"covariance must be None, a number, a vector of variances or a square matrix; got shape {numbers.shape}."
        )
    return numbers


def _triangle(matrix: Numbers) -> Numbers:
    scale = np.abs(matrix).max()
    if np.abs(matrix - matrix.T).max() > 1e-10 * scale:
        raise GeometryError("covariance is not symmetric. Symmetrise it, as in (covariance + covariance.T) / 2.")
    eigenvalues = np.linalg.eigvalsh(matrix)
    if eigenvalues[0] <= len(matrix) * np.finfo(np.float64).eps * scale:
        raise _not_positive(float(eigenvalues[0]))
    return np.linalg.cholesky((matrix + matrix.T) / 2)


def _not_positive(smallest: float) -> GeometryError:
    return GeometryError(
        f"covariance is not positive definite: its smallest eigenvalue is {smallest:.3g}. Add a positive number to its "
        "diagonal, or leave out the outputs that never vary."
    )
