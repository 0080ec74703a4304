"""Grouped heads: several query heads that share one key/value head."""

from __future__ import annotations

from tidegate._validation import InputError
from tidegate.tensors._checks import require_rank
from tidegate.tensors.namespace import Array, Namespace, namespace_of


def repeat_heads(x: Array, num_heads: int) -> Array:
    """Repeat each head of (..., heads, m, n) to get `num_heads`; copies of a head are adjacent."""
    require_rank("..., heads, row, column", x=x)
    *leading, heads, rows, columns = x.shape
    if num_heads % heads:
        raise InputError("num_heads", expected=f"a multiple of x's {heads} heads", got=num_heads)
    xp = namespace_of(x)
    expanded = xp.broadcast_to(x[..., None, :, :], (*leading, heads, num_heads // heads, rows, columns))
    return xp.reshape(expanded, (*leading, num_heads, rows, columns))


def merge_groups(x: Array, num_groups: int) -> Array:
    """Concatenate the heads of each group: (..., H, T, h) → (..., groups, T, (H / groups) h)."""
    xp, grouped = _grouped(x, num_groups)
    *leading, size, positions, width = grouped.shape
    return xp.reshape(xp.moveaxis(grouped, -3, -2), (*leading, positions, size * width))


def split_groups(x: Array, group_size: int) -> Array:
    """Undo `merge_groups`: (..., groups, T, group_size · h) → (..., groups · group_size, T, h)."""
    require_rank("..., heads, row, column", x=x)
    *leading, groups, positions, width = x.shape
    if width % group_size:
        raise InputError("group_size", expected=f"a divisor of x's width, {width}", got=group_size)
    xp = namespace_of(x)
    split = xp.reshape(x, (*leading, groups, positions, group_size, width // group_size))
    return xp.reshape(xp.moveaxis(split, -2, -3), (*leading, groups * group_size, positions, width // group_size))


def sum_groups(x: Array, num_groups: int) -> Array:
    """Sum the heads of each group, (..., H, m, n) → (..., groups, m, n): the transpose of `repeat_heads`."""
    xp, grouped = _grouped(x, num_groups)
    return xp.sum(grouped, axis=-3)


def _grouped(x: Array, num_groups: int) -> tuple[Namespace, Array]:
    """Split the axis of heads: (..., H, m, n) → (..., groups, H / groups, m, n)."""
    require_rank("..., heads, row, column", x=x)
    *leading, heads, rows, columns = x.shape
    if heads % num_groups:
        raise InputError("num_groups", expected=f"a divisor of x's {heads} heads", got=num_groups)
    xp = namespace_of(x)
    return xp, xp.reshape(x, (*leading, num_groups, heads // num_groups, rows, columns))
