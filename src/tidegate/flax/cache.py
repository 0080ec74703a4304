"""Keys and values of the positions that have gone by.

Legend: B batch, T new positions, S positions that there is room for, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from tidegate._validation import require_sizes
from tidegate.sizes import HeadShape


class KVCache(NamedTuple):
    """The cache of one attention layer, a pytree of fixed shapes: rotated keys and gated values.

    It is plain arrays and knows no layer. `cache._replace(length=n)` goes back to its first n positions.
    """

    key: Array
    """(B, S, G, D)"""
    value: Array
    """(B, S, G, D)"""
    length: Array
    """() int32: positions that it holds, the first ones."""


def init_cache(shape: HeadShape, *, batch: int, max_length: int, dtype: jax.typing.DTypeLike = jnp.float32) -> KVCache:
    """An empty cache with room for `max_length` positions."""
    require_sizes(max_length=max_length)
    empty = jnp.zeros((batch, max_length, shape.num_kv_heads, shape.head_dim), dtype)
    return KVCache(key=empty, value=empty, length=jnp.zeros((), jnp.int32))


def require_cache(cache: object) -> None:
    """Refuse what is no cache, such as a list of them."""
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache must be a KVCache of tidegate.flax; got {type(cache).__name__}. Make it with init_cache; a model "
            "takes a list of them as caches."
        )


def update_cache(cache: KVCache, key_BTGD: Array, value_BTGD: Array) -> KVCache:
    """The cache with the new positions after those that it holds.

    More than there is room for is refused, or, while `length` is traced, makes the layer's output nan.
    """
    batch, room, heads, _ = cache.key.shape
    if (key_BTGD.shape[0], key_BTGD.shape[2]) != (batch, heads):
        raise ValueError(
            f"cache holds a batch of {batch} with {heads} heads; got {key_BTGD.shape[0]} with {key_BTGD.shape[2]}. "
            "Start a new cache for another batch."
        )
    new = key_BTGD.shape[1]
    needed = new if isinstance(cache.length, Tracer) else int(cache.length) + new
    if needed > room:
        raise ValueError(f"cache has room for max_length={room} positions; {needed} are needed. Make it longer.")

    def write_at(held: Array, update: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, update.astype(held.dtype), cache.length, axis=1)

    return KVCache(
        key=write_at(cache.key, key_BTGD),
        value=write_at(cache.value, value_BTGD),
        length=cache.length + new,
    )
