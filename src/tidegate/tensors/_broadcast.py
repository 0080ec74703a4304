"""The transpose of broadcasting."""

from __future__ import annotations

from tidegate.tensors.namespace import Array, namespace_of


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of this shape was broadcast to x's."""
    xp = namespace_of(x)
    extra = x.ndim - len(shape)
    repeated = tuple(extra + axis for axis, size in enumerate(shape) if size == 1 and x.shape[extra + axis] != 1)
    axes = (*range(extra), *repeated)
    return xp.reshape(xp.sum(x, axis=axes), shape) if axes else x
