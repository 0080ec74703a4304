"""Rotary position embedding: each pair of channels turns by an angle proportional to the position."""

from __future__ import annotations

from tidegate.config import Rotary
from tidegate.tensors._checks import require_batches_broadcast, require_equal, require_floating, require_rank
from tidegate.tensors.namespace import Array, accumulate, unify


def rotary_angles(positions: Array, head_dim: int, rotary: Rotary, *, like: Array) -> Array:
    r"""Angles $(p + o)/s \cdot b^{-2i/w}$, in float32 or better.

    positions : (..., T) integers or reals
    like      : any array of the kind, device and dtype that is wanted
    returns   : (..., T, pairs)
    """
    xp, positions, like = unify(positions=positions, like=like)
    reference = accumulate(like)
    frequencies = xp.asarray(rotary.frequencies(head_dim), dtype=reference.dtype)
    if hasattr(reference, "to"):
        frequencies = frequencies.to(reference.device)
    steps = (xp.astype(positions, reference.dtype) + rotary.offset) / rotary.scale
    return steps[..., None] * frequencies


def rotate(x: Array, angles: Array) -> Array:
    r"""Turn channel i and channel i + w/2 of the first w channels by the i-th angle; a rotation, so norms stay.

    x       : (..., T, h)
    angles  : (..., T, w/2), broadcasting over x's leading axes
    returns : (..., T, h); the dtype is the wider of the two
    """
    xp, x, angles = unify(x=x, angles=angles)
    require_floating(x=x, angles=angles)
    require_rank("position, width", x=x, angles=angles)
    require_equal("number of positions", x=x.shape[-2], angles=angles.shape[-2])
    pairs = angles.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"angles has {pairs} pairs, which need {2 * pairs} channels; x has {x.shape[-1]}.")
    if require_batches_broadcast(2, x=x, angles=angles) != tuple(x.shape[:-2]):
        raise ValueError(
            f"angles must broadcast to x's leading axes, {tuple(x.shape[:-2])}; got {tuple(angles.shape[:-2])}."
        )
    cosine, sine = xp.cos(angles), xp.sin(angles)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return xp.concat([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
