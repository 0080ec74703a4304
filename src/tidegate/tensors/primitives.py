"""What the array API lacks, by the arrays' own library."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from tidegate.tensors.namespace import Array, namespace_of


def erf(array: Array) -> Array:
    """Return the error function."""
    if isinstance(array, np.ndarray):
        values: Array = np.vectorize(math.erf, otypes=[np.float64])(array)
        return values.astype(cast("Any", array).dtype)
    return array.erf() if hasattr(array, "erf") else _lax().erf(array)


def stop_gradient(array: Array) -> Array:
    """Return the same numbers, through which no gradient passes."""
    if hasattr(array, "detach"):
        return array.detach()
    return cast("Array", array) if isinstance(array, np.ndarray) else _lax().stop_gradient(array)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of this shape was broadcast to x's: the transpose of broadcasting."""
    xp = namespace_of(x)
    extra = x.ndim - len(shape)
    repeated = tuple(extra + axis for axis, size in enumerate(shape) if size == 1 and x.shape[extra + axis] != 1)
    axes = (*range(extra), *repeated)
    return xp.reshape(xp.sum(x, axis=axes), shape) if axes else x


def _lax() -> Any:
    import jax

    return jax.lax
