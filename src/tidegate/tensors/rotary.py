"""Rotary position embedding: each pair of channels turns by an angle proportional to the position."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidegate.tensors._checks import require_batches_broadcast, require_equal, require_floating, require_rank
from tidegate.tensors.namespace import Array, accumulate, unify


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How positions turn into angles: position p turns pair i by `(p + offset) / scale · base^(−2i/w)`."""

    base: float = 10_000.0
    """The slowest pair turns by nearly 1/base a position."""
    fraction: float = 1.0
    """Share of a head's channels that turn, the first ones; the rest stay as they are."""
    scale: float = 1.0
    """Positions are divided by it: 4 fits four times the trained length into the trained angles."""
    offset: int = 0
    """Added to every position."""

    def __post_init__(self) -> None:
        for name in ("base", "scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Rotary.{name} must be a finite number above 0; got {value!r}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Rotary.fraction must lie in (0, 1]; got {self.fraction!r}.")

    def width(self, head_dim: int) -> int:
        """Channels that turn: `fraction` of the head, which must come to an even number."""
        width = round(head_dim * self.fraction)
        if width % 2 or width == 0 or not math.isclose(width, head_dim * self.fraction, abs_tol=1e-6):
            raise ValueError(
                f"Rotary.fraction must select an even number of the head's {head_dim} channels; "
                f"{self.fraction} selects {head_dim * self.fraction:g}."
            )
        return width

    def frequencies(self, head_dim: int) -> list[float]:
        """Angle of each pair at position 1, before the scale."""
        width = self.width(head_dim)
        return [self.base ** (-2 * pair / width) for pair in range(width // 2)]


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
