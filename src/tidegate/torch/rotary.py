"""Rotary position embedding for PyTorch tensors; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tidegate.config import Rotary
from tidegate.torch.precision import wide_dtype


class Turn(NamedTuple):
    """What each channel is multiplied by, (T, 1, width) or (B, T, 1, width), in float32 or better."""

    own: Tensor
    """The cosines of the angles, for the channel itself."""
    partner: Tensor
    """Their sines, for the channel half the width away: minus for the first half of the channels."""


def rotary_turn(positions: Tensor, width: int, rotary: Rotary, dtype: torch.dtype) -> Turn:
    """What queries and keys at positions (T,) or (B, T) are turned by.

    width : channels that turn, `rotary.width(head_dim)`, which a compiled layer must know beforehand
    """
    wide = wide_dtype(dtype)
    # Made on the device, so that no step waits for a copy from the host.
    pairs = torch.arange(width // 2, dtype=wide, device=positions.device)
    frequencies = rotary.base ** (-2 * pairs / width)
    if rotary.ramp is not None:
        first, last = rotary.ramp
        share = ((pairs - first) / (last - first)).clamp(0, 1)
        frequencies = frequencies * (share + (1 - share) * rotary.scale)
    steps = (positions.to(wide) + rotary.offset) / rotary.scale
    angles = (steps[..., None] * frequencies).unsqueeze(-2)
    cosine, sine = angles.cos(), angles.sin()
    return Turn(torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1))


def rotate(x_BTHD: Tensor, turn: Turn) -> Tensor:
    """Turn channel i and channel i + w/2 of the first w channels by the i-th angle; of x's dtype."""
    width = turn.own.shape[-1]
    turning = x_BTHD if width == x_BTHD.shape[-1] else x_BTHD[..., :width]
    if turning.dtype != turn.own.dtype:
        turning = turning.to(turn.own.dtype)
    # Half the width away is the partner, from either side: a roll over contiguous channels, faster than two halves.
    turned = torch.addcmul(turning * turn.own, turning.roll(width // 2, dims=-1), turn.partner)
    if turned.dtype != x_BTHD.dtype:
        turned = turned.to(x_BTHD.dtype)
    return turned if width == x_BTHD.shape[-1] else torch.cat((turned, x_BTHD[..., width:]), dim=-1)
