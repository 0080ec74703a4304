"""Keys and values of earlier positions.

Legend: B batch, T new positions, S capacity, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from tidegate._validation import InputError, require_sizes
from tidegate.sizes import HeadShape


class KVCache(NamedTuple):
    """The cache of one attention layer, a pytree of fixed shapes with rotated keys and gated values.

    `cache._replace(length=n)` goes back to its first n positions.
    """

    key: Array
    """(B, S, G, D)"""
    value: Array
    """(B, S, G, D)"""
    length: Array
    """() int32, the number of cached positions."""


def init_cache(shape: HeadShape, *, batch: int, max_length: int, dtype: jax.typing.DTypeLike = jnp.float32) -> KVCache:
    """Return an empty cache with room for `max_length` positions."""
    require_sizes(max_length=max_length)
    empty = jnp.zeros((batch, max_length, shape.num_kv_heads, shape.head_dim), dtype)
    return KVCache(key=empty, value=empty, length=jnp.zeros((), jnp.int32))


def require_cache(cache: object) -> None:
    """Raise TypeError for anything that is not a cache, such as a list of them."""
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache must be a KVCache of tidegate.flax, got {type(cache).__name__}. Make it with init_cache; a model "
            "takes a list of them as caches."
        )


def update_cache(cache: KVCache, key_BTGD: Array, value_BTGD: Array) -> KVCache:
    """Return the cache with the new positions after those that it holds.

    Raise InputError if it overflows; while `length` is traced, the layer's output becomes nan instead.
    """
    batch, room, heads, _ = cache.key.shape
    if (key_BTGD.shape[0], key_BTGD.shape[2]) != (batch, heads):
        given = f"one of {batch} with {heads}"
        expected = f"one of a batch of {key_BTGD.shape[0]} with {key_BTGD.shape[2]} heads"
        raise InputError("cache", expected=expected, got=given, hint="Start a new cache for another batch.")
    new = key_BTGD.shape[1]
    needed = new if isinstance(cache.length, Tracer) else int(cache.length) + new
    if needed > room:
        raise InputError("cache", expected=f"one with room for {needed} positions", got=f"max_length={room}")

    def write_at(held: Array, update: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, update.astype(held.dtype), cache.length, axis=1)

    return KVCache(
        key=write_at(cache.key, key_BTGD),
        value=write_at(cache.value, value_BTGD),
        length=cache.length + new,
    )
