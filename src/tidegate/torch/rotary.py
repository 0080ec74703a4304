"""Rotary position embedding for PyTorch tensors; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.tensors.rotary import Rotary
from tidegate.torch.precision import wide_dtype

__all__ = ["rotary_angles", "rotate"]


def rotary_angles(positions: Tensor, width: int, rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """Angles (T, 1, width / 2) of positions (T,), or (B, T, 1, width / 2) of positions (B, T), in float32 or better.

    width : channels that turn, `rotary.width(head_dim)`, which a compiled layer must know beforehand
    """
    wide = wide_dtype(dtype)
    # Made on the device, so that no step waits for a copy from the host.
    pairs = torch.arange(width // 2, dtype=wide, device=positions.device)
    frequencies = rotary.base ** (-2 * pairs / width)
    steps = (positions.to(wide) + rotary.offset) / rotary.scale
    return (steps[..., None] * frequencies).unsqueeze(-2)


def rotate(x_BTHD: Tensor, angles: Tensor) -> Tensor:
    """Turn channel i and channel i + w/2 of the first w channels by the i-th angle; of x's dtype."""
    pairs = angles.shape[-1]
    first, second, rest = x_BTHD.split((pairs, pairs, x_BTHD.shape[-1] - 2 * pairs), dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x_BTHD.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
