"""Grouped heads: several query heads that share one key/value head."""

from __future__ import annotations

from tidegate.tensors._checks import require_rank
from tidegate.tensors.namespace import Array, namespace_of


def repeat_heads(x: Array, num_heads: int) -> Array:
    """Each head of (..., heads, m, n) repeated in place until there are `num_heads`: group g serves its own heads."""
    require_rank("heads, row, column", x=x)
    xp = namespace_of(x)
    *leading, heads, rows, columns = x.shape
    if num_heads % heads:
        raise ValueError(f"num_heads must be a multiple of the {heads} heads that are there; got {num_heads}.")
    expanded = xp.broadcast_to(x[..., None, :, :], (*leading, heads, num_heads // heads, rows, columns))
    return xp.reshape(expanded, (*leading, num_heads, rows, columns))


def merge_groups(x: Array, num_groups: int) -> Array:
    """The heads of each group side by side: (..., H, T, h) → (..., groups, T, (H / groups) h)."""
    require_rank("heads, row, column", x=x)
    xp = namespace_of(x)
    *leading, heads, positions, width = x.shape
    if heads % num_groups:
        raise ValueError(f"The number of heads, {heads}, must be a multiple of the number of groups; got {num_groups}.")
    grouped = xp.reshape(x, (*leading, num_groups, heads // num_groups, positions, width))
    return xp.reshape(xp.moveaxis(grouped, -3, -2), (*leading, num_groups, positions, heads // num_groups * width))


def split_groups(x: Array, group_size: int) -> Array:
    """Undo `merge_groups`: (..., groups, T, group_size · h) → (..., groups · group_size, T, h)."""
    require_rank("heads, row, column", x=x)
    xp = namespace_of(x)
    *leading, groups, positions, width = x.shape
    if width % group_size:
        raise ValueError(f"group_size must divide the width, {width}; got {group_size}.")
    parted = xp.reshape(x, (*leading, groups, positions, group_size, width // group_size))
    return xp.reshape(xp.moveaxis(parted, -2, -3), (*leading, groups * group_size, positions, width // group_size))


def sum_groups(x: Array, num_groups: int) -> Array:
    """The transpose of `repeat_heads`: heads added up within each group, (..., H, m, n) → (..., groups, m, n)."""
    require_rank("heads, row, column", x=x)
    xp = namespace_of(x)
    *leading, heads, rows, columns = x.shape
    if heads % num_groups:
        raise ValueError(f"num_groups must divide the {heads} heads; got {num_groups}.")
    return xp.sum(xp.reshape(x, (*leading, num_groups, heads // num_groups, rows, columns)), axis=-3)
