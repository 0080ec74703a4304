"""Rotary position embedding for PyTorch tensors; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tidegate.tensors.rotary import Rotary
from tidegate.torch.precision import wide_dtype

__all__ = ["Turn", "rotary_turn", "rotate"]


class Turn(NamedTuple):
    """Cosines and sines of the angles, (T, 1, pairs) or (B, T, 1, pairs), in float32 or better."""

    cosine: Tensor
    sine: Tensor


def rotary_turn(positions: Tensor, width: int, rotary: Rotary, dtype: torch.dtype) -> Turn:
    """What queries and keys at positions (T,) or (B, T) are turned by.

    width : channels that turn, `rotary.width(head_dim)`, which a compiled layer must know beforehand
    """
    wide = wide_dtype(dtype)
    # Made on the device, so that no step waits for a copy from the host.
    pairs = torch.arange(width // 2, dtype=wide, device=positions.device)
    frequencies = rotary.base ** (-2 * pairs / width)
    steps = (positions.to(wide) + rotary.offset) / rotary.scale
    angles = (steps[..., None] * frequencies).unsqueeze(-2)
    return Turn(angles.cos(), angles.sin())


def rotate(x_BTHD: Tensor, turn: Turn) -> Tensor:
    """Turn channel i and channel i + w/2 of the first w channels by the i-th angle; of x's dtype."""
    cosine, sine = turn
    pairs = cosine.shape[-1]
    first, second, rest = x_BTHD.split((pairs, pairs, x_BTHD.shape[-1] - 2 * pairs), dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x_BTHD.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
