"""Which keys each query may see, beyond what the kernel knows by itself.

Legend: B batch, T query positions, S attended positions, H query heads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tidegate._validation import InputError, require_array, require_mask_shape
from tidegate.flax.cache import KVCache


def require_mask(mask: Array, shape: tuple[int, int, int, int]) -> Array:
    """The mask with all four axes; it must be an array, bool or floating, and broadcast to (B, H, T, S)."""
    require_mask_array(mask)
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(
            f"mask must be bool, True where a query may attend, or floating, added to the scores; got {mask.dtype}. "
            "Compare it, as in mask != 0."
        )
    require_mask_shape(tuple(mask.shape), shape)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def require_mask_array(mask: object) -> None:
    """Refuse a mask that is no array, such as a list; an array of NumPy is one."""
    require_array("mask", mask, fits=hasattr(mask, "dtype"), kind="an array", remedy="jnp.asarray")


def segment_mask(segment_ids: Array, *, batch: int, num_positions: int) -> Array:
    """(B, 1, T, T) bool: positions see their own segment only.

    segment_ids : (B, T) integers
    """
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers; got {segment_ids.dtype}.")
    if segment_ids.shape != (batch, num_positions):
        raise InputError("segment_ids", expected=f"of shape {(batch, num_positions)}", got=tuple(segment_ids.shape))
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def cached_mask(cache: KVCache, *, num_queries: int, causal: bool, window: int | None) -> Array:
    """(1, 1, T, S) bool for the last T of the cached positions: no key that is not there yet, nor out of reach."""
    length = cache.length
    queries = length - num_queries + jnp.arange(num_queries)
    keys = jnp.arange(cache.key.shape[1])
    distance = queries[:, None] - keys
    allowed = distance >= 0 if causal else jnp.broadcast_to(keys < length, distance.shape)
    return (allowed if window is None else allowed & (abs(distance) < window))[None, None]
