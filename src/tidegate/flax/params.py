"""Parameters as plain pytrees: their names and shapes, what is said of those that do not fit, and their precision."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tidegate._files import require_shapes

Params: TypeAlias = dict[str, Any]
"""Nested dictionaries of arrays, a pytree."""


def dotted_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf, its parts joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every array by its dotted path."""
    return {dotted_path(path): tuple(array.shape) for path, array in jax.tree_util.tree_leaves_with_path(params)}


def require_params(params: Any, expected: dict[str, tuple[int, ...]]) -> None:
    """The parameters have just these names and shapes."""
    require_shapes(named_shapes(params), expected, complaint="params do not fit the configuration")


def cast_params(params: Params, dtype: jax.typing.DTypeLike | None) -> Params:
    """The parameters in the dtype of a computation; those of gates in float32 or better, as their logits are.

    dtype : None leaves all as they are
    """
    if dtype is None:
        return params

    def cast(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        is_gate = "attn_gate" in dotted_path(path).split(".")
        return array.astype(jnp.promote_types(dtype, jnp.float32) if is_gate else dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
