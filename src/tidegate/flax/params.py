"""Parameters as plain pytrees: their names, shapes, precision and initial values."""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._files import require_shapes
from tidegate.config import Init, embedding_std, init_std

Params: TypeAlias = dict[str, Any]
"""Nested dictionaries of arrays, a pytree."""

_WRITERS = ("o_proj", "down_proj")
"""The projections that write to the residual stream."""


def dotted_path(path: tuple[Any, ...]) -> str:
    """Return the path of a leaf, its parts joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array by its dotted path."""
    return {dotted_path(path): tuple(array.shape) for path, array in jax.tree_util.tree_leaves_with_path(params)}


def require_params(params: Any, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise InputError unless the parameters have exactly these names and shapes."""
    require_shapes(named_shapes(params), expected, complaint="params do not fit the configuration")


def cast_params(params: Params, dtype: jax.typing.DTypeLike | None) -> Params:
    """Convert parameters to the dtype of a computation, those of gates to float32 or better; None returns them."""
    if dtype is None:
        return params

    def cast(path: tuple[Any, ...], array: Array) -> Array:
        is_gate = "attn_gate" in dotted_path(path).split(".")
        return array.astype(jnp.promote_types(dtype, jnp.float32) if is_gate else dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def initialize(key: Array, params: Params, *, init: Init, num_layers: int) -> Params:
    """Return the parameters with kernels and embeddings drawn by `tidegate.config.init_std`.

    Gates, norms and metrics stay unchanged, and so do biases except with `torch`, where they are uniform like their
    kernel. Each array has its own key, which depends only on the given key and the array's name, so variants made with
    the same key start with equal values in all matrices that they share.
    """
    fans_in = _fans_in(params)

    def draw(path: tuple[Any, ...], array: Array) -> Array:
        name = dotted_path(path)
        *_, owner, leaf = name.split(".")
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if leaf == "embedding":
            return embedding_std(init) * jax.random.normal(own, array.shape, array.dtype)
        if leaf == "bias" and init == "torch" and owner in fans_in:
            return jax.random.uniform(own, array.shape, array.dtype, -1, 1) * fans_in[owner] ** -0.5
        if leaf != "kernel":
            return array
        std = init_std(init, fan_in=fans_in[owner], num_layers=num_layers, writes=owner in _WRITERS)
        if init == "torch":
            return math.sqrt(3) * std * jax.random.uniform(own, array.shape, array.dtype, -1, 1)
        return std * jax.random.normal(own, array.shape, array.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def _fans_in(params: Params) -> dict[str, int]:
    """Return the fan-in of each kernel by the name of its projection."""
    kernels: dict[str, int] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        *_, owner, leaf = dotted_path(path).split(".")
        if leaf == "kernel":
            # Kernels that write to the stream have their output axis last, the others their input axis first.
            kernels[owner] = math.prod(array.shape[:-1]) if owner in _WRITERS else array.shape[0]
    return kernels
