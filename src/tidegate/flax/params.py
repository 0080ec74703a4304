"""Parameters by their dotted paths, and what is said of those that do not fit a configuration."""

from __future__ import annotations

from typing import Any

import jax

from tidegate._files import require_shapes


def dotted(path: tuple[Any, ...]) -> str:
    """The path of a leaf, its parts joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every array by its dotted path."""
    return {dotted(path): tuple(array.shape) for path, array in jax.tree_util.tree_leaves_with_path(params)}


def require_params(params: Any, expected: dict[str, tuple[int, ...]]) -> None:
    """The parameters have just these names and shapes."""
    require_shapes(named_shapes(params), expected, complaint="params do not fit the configuration")
