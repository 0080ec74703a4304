"""Rotary position embedding for PyTorch tensors; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from tidegate.config import Rotary
from tidegate.torch.precision import wide_dtype


@final
class RotaryTables:
    """Cosines and sines of all angles at some positions, computed once for all layers that share an embedding.

    A class of its own, so that FSDP, which casts the tensors in a layer's arguments, does not cast these.

    Attributes:
        own: Cosines, the factors of each channel: (T, 1, width) or (B, T, 1, width), float32 or better.
        partner: Sines, the factors of the channel half the width away; negative for the first half of the channels.
    """

    def __init__(self, own: Tensor, partner: Tensor) -> None:
        self.own, self.partner = own, partner


def rotary_tables(positions: Tensor, width: int, rotary: Rotary, dtype: torch.dtype) -> RotaryTables:
    """Return the tables that rotate queries and keys of some dtype at positions (T,) or (B, T).

    `width`, the number of channels to rotate, is `rotary.width(head_dim)`: a compiled layer needs a constant.
    """
    wide = wide_dtype(dtype)
    # Created on the device, so that no step waits for a copy from the host.
    pairs = torch.arange(width // 2, dtype=wide, device=positions.device)
    frequencies = rotary.base ** (-2 * pairs / width)
    if rotary.ramp is not None:
        first, last = rotary.ramp
        share = ((pairs - first) / (last - first)).clamp(0, 1)
        frequencies = frequencies * (share + (1 - share) * rotary.scale)
    steps = (positions.to(wide) + rotary.offset) / rotary.scale
    angles = (steps[..., None] * frequencies).unsqueeze(-2)
    cosine, sine = angles.cos(), angles.sin()
    return RotaryTables(torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1))


def rotate(x_BTHD: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate channels i and i + w/2 of the first w channels by the i-th angle; the result has the dtype of x."""
    width = tables.own.shape[-1]
    rotating = x_BTHD if width == x_BTHD.shape[-1] else x_BTHD[..., :width]
    if rotating.dtype != tables.own.dtype:
        rotating = rotating.to(tables.own.dtype)
    # The partner is half the width away in both directions: a roll is faster than two halves.
    rotated = torch.addcmul(rotating * tables.own, rotating.roll(width // 2, dims=-1), tables.partner)
    if rotated.dtype != x_BTHD.dtype:
        rotated = rotated.to(x_BTHD.dtype)
    return rotated if width == x_BTHD.shape[-1] else torch.cat((rotated, x_BTHD[..., width:]), dim=-1)
