"""A covariance in any of its forms, and the change of units that turns its inner product into the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.differentiation import Numbers
from tidegate.geometry.errors import GeometryError


@dataclass(frozen=True)
class Whitening:
    r"""The root $L$ of a covariance $\Sigma = L L^T$: in the units $L^{-1} y$ lengths are those of $\Sigma^{-1}$."""

    root: Numbers | None
    """None for the identity; no axes for a number, one for a diagonal, two for a lower triangle."""

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
                "number to its diagonal, or leave out the outputs that never vary."
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

    def matrix(self, width: int) -> Numbers:
        """Return L⁻¹ as a matrix (N, N)."""
        return self.whiten(np.eye(width)).T
