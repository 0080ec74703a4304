"""Rotary position embedding for JAX arrays; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tidegate.config import Rotary


def rotary_angles(positions: Array, head_dim: int, rotary: Rotary, dtype: jax.typing.DTypeLike) -> Array:
    """Angles (T, 1, pairs) of positions (T,), or (B, T, 1, pairs) of positions (B, T), in float32 or better."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(rotary.frequencies(head_dim), dtype=wide)
    steps = (positions.astype(wide) + rotary.offset) / rotary.scale
    return (steps[..., None] * frequencies)[..., None, :]


def rotate(x_BTHD: Array, angles: Array) -> Array:
    """Turn channel i and channel i + w/2 of the first w channels by the i-th angle; of x's dtype."""
    pairs = angles.shape[-1]
    first, second, rest = jnp.split(x_BTHD, (pairs, 2 * pairs), axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=-1)
    return jnp.concatenate((turned.astype(x_BTHD.dtype), rest), axis=-1)
