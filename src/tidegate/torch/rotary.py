"""Rotary position embedding for PyTorch tensors; `tidegate.tensors.rotary` has the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.tensors.rotary import Rotary

__all__ = ["rotary_angles", "rotate"]


def rotary_angles(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """Angles (B or 1, T, 1, pairs) of positions (T,) or (B, T), in float32 or better."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = torch.tensor(rotary.frequencies(head_dim), dtype=wide, device=positions.device)
    steps = (positions.to(wide) + rotary.offset) / rotary.scale
    return (steps[..., None] * frequencies).reshape(-1, positions.shape[-1], 1, len(rotary.frequencies(head_dim)))


def rotate(x_BTHD: Tensor, angles: Tensor) -> Tensor:
    """Turn channel i and channel i + w/2 of the first w channels by the i-th angle; of x's dtype."""
    pairs = angles.shape[-1]
    first, second, rest = x_BTHD.split((pairs, pairs, x_BTHD.shape[-1] - 2 * pairs), dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x_BTHD.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
