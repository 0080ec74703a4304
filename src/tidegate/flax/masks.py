"""Masks for attention calls, in addition to the kernel's own causality and window.

Legend: B batch, T query positions, S attended positions, H query heads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tidegate._validation import InputError, require_array, require_mask_shape
from tidegate.flax.cache import KVCache


class SequenceInfo(NamedTuple):
    """Mask, positions and segments of a batch of sequences; layers, blocks and models pass it along."""

    mask: Array | None = None
    """Bool (True = attend) or additive float, broadcasting to (B, H, T, S)."""
    positions: Array | None = None
    """(T,) or (B, T); None counts."""
    segment_ids: Array | None = None
    """(B, T) ids of packed documents."""


def combine_masks(
    info: SequenceInfo,
    shape: tuple[int, int, int, int],
    *,
    dtype: jnp.dtype,
    cache: KVCache | None,
    causal: bool,
    window: int | None,
) -> tuple[Array | None, Array | None]:
    """Return the bool mask and the additive bias for scores of this shape (B, H, T, S).

    Causality and window are part of the mask only with a cache; otherwise the kernel applies them.
    """
    batch, _, num_queries, _ = shape
    bias = None
    parts: list[Array] = []
    if info.mask is not None:
        mask = require_mask(info.mask, shape)
        if mask.dtype == jnp.bool_:
            parts.append(mask)
        else:
            bias = mask.astype(dtype)
    if info.segment_ids is not None:
        parts.append(segment_mask(info.segment_ids, batch=batch, num_positions=num_queries))
    if cache is not None:
        parts.append(cached_mask(cache, num_queries=num_queries, causal=causal, window=window))
    return functools.reduce(jnp.logical_and, parts) if parts else None, bias


def require_mask(mask: Array, shape: tuple[int, int, int, int]) -> Array:
    """Return the mask with all four axes; raise unless it is bool or floating and broadcasts to (B, H, T, S)."""
    require_array("mask", mask, fits=hasattr(mask, "dtype"), kind="an array", remedy="jnp.asarray")
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(
            f"mask must be bool (True = attend) or floating (added to the scores), got {mask.dtype}. "
            "Compare it, as in mask != 0."
        )
    require_mask_shape(tuple(mask.shape), shape)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def segment_mask(segment_ids: Array, *, batch: int, num_positions: int) -> Array:
    """Return the mask (B, 1, T, T) of segments (B, T): positions see their own segment only."""
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got {segment_ids.dtype}.")
    if segment_ids.shape != (batch, num_positions):
        raise InputError("segment_ids", expected=f"of shape {(batch, num_positions)}", got=tuple(segment_ids.shape))
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def cached_mask(cache: KVCache, *, num_queries: int, causal: bool, window: int | None) -> Array:
    """Return the mask (1, 1, T, S) of the last T cached positions, which hides empty slots and keys out of reach."""
    length = cache.length
    queries = length - num_queries + jnp.arange(num_queries)
    keys = jnp.arange(cache.key.shape[1])
    distance = queries[:, None] - keys
    allowed = distance >= 0 if causal else jnp.broadcast_to(keys < length, distance.shape)
    return (allowed if window is None else allowed & (abs(distance) < window))[None, None]
