"""Rotary position embedding: each pair of channels is rotated by an angle proportional to the position."""

from __future__ import annotations

from tidegate._validation import InputError
from tidegate.config import Rotary
from tidegate.tensors._checks import broadcast_batches, check_arrays
from tidegate.tensors.namespace import Array, accumulate, unify


def rotary_angles(positions: Array, head_dim: int, rotary: Rotary, *, like: Array) -> Array:
    r"""Return angles $(p + o)/s \cdot b^{-2i/w}$, (..., T, pairs), in float32 or better.

    Args:
        positions: (..., T) integers or reals
        head_dim: Width of a head.
        rotary: Options of the embedding.
        like: Any array of the wanted library, device and dtype.
    """
    xp, positions, like = unify(positions=positions, like=like)
    reference = accumulate(like)
    frequencies = xp.asarray(rotary.frequencies(head_dim), dtype=reference.dtype)
    if hasattr(reference, "to"):
        frequencies = frequencies.to(reference.device)
    steps = (xp.astype(positions, reference.dtype) + rotary.offset) / rotary.scale
    return steps[..., None] * frequencies


def rotate(x: Array, angles: Array) -> Array:
    r"""Rotate channels i and i + w/2 of the first w channels by the i-th angle, which preserves norms.

    Args:
        x: (..., T, h)
        angles: (..., T, w/2), broadcasting over x's leading axes

    Returns:
        (..., T, h); the dtype is the wider of the two
    """
    xp, x, angles = check_arrays(x=(x, "..., position, width"), angles=(angles, "..., position, pairs"))
    pairs = angles.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise InputError("angles", expected=f"at most one for each pair of x's {x.shape[-1]} channels", got=pairs)
    if broadcast_batches(x=tuple(x.shape)[:-2], angles=tuple(angles.shape)[:-2]) != tuple(x.shape)[:-2]:
        expected = f"broadcastable to x's leading axes {tuple(x.shape)[:-2]}"
        raise InputError("angles", expected=expected, got=tuple(angles.shape)[:-2])
    cosine, sine = xp.cos(angles), xp.sin(angles)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return xp.concat([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
