"""Where half precision is not enough: float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself if it is float32 or better, else float32."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """The same numbers in float32 or better."""
    return x if x.dtype in _WIDE else x.to(wide_dtype(x.dtype))
