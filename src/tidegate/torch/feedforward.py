"""The feed-forward layer of a transformer block.

Legend: B batch, T positions, M model width, F inner width.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import require_choice
from tidegate.config import FeedForwardKind
from tidegate.torch.kernel import silu


class FeedForward(nn.Module):
    """`swiglu`: (silu(x W_gate) ⊙ x W_up) W_down; `gelu`: gelu(x W_up) W_down."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        kind: FeedForwardKind = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_choice("kind", kind, get_args(FeedForwardKind))
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype) if kind == "swiglu" else None
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x_BTM: Tensor) -> Tensor:
        """Each position by itself, (B, T, M)."""
        up_BTF = self.up_proj(x_BTM)
        inner_BTF = F.gelu(up_BTF) if self.gate_proj is None else silu(self.gate_proj(x_BTM)) * up_BTF
        return self.down_proj(inner_BTF)

    def flops_per_token(self) -> int:
        """Multiplications and additions of one position's forward pass, the matrix products alone."""
        return 2 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
