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
    """Append new positions to the cache.

    Raise InputError if it overflows; while `length` is traced, the layer's output becomes nan instead.
    """
    batch, room, heads, _ = cache.key.shape
    new_batch, new, new_heads, _ = key_BTGD.shape
    if (new_batch, new_heads) != (batch, heads):
        expected, given = f"for a batch of {new_batch} with {new_heads} heads", f"a batch of {batch} with {heads}"
        raise InputError("cache", expected=expected, got=given, hint="Start a new cache for another batch.")
    needed = new if isinstance(cache.length, Tracer) else int(cache.length) + new
    if needed > room:
        raise InputError("cache", expected=f"one with room for {needed} positions", got=f"max_length={room}")

    key, value = (
        jax.lax.dynamic_update_slice_in_dim(cached, update.astype(cached.dtype), cache.length, axis=1)
        for cached, update in ((cache.key, key_BTGD), (cache.value, value_BTGD))
    )
    return KVCache(key=key, value=value, length=cache.length + new)
