"""A metric per head: weights of the channels of queries and keys, or a matrix between them.

Legend: B batch, T positions, H query heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidegate.config import MetricKind
from tidegate.sizes import HeadShape


class HeadMetric(nn.Module):
    """A metric for the product of queries and keys: `diagonal` is m ⊙ q, `learned` is (Wᵀ W) q; initially the identity.

    `weight` is (H, D), or (H, D, D).
    """

    def __init__(
        self,
        kind: MetricKind,
        shape: HeadShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind: MetricKind = kind
        size = (shape.num_heads, shape.head_dim) + ((shape.head_dim,) if kind == "learned" else ())
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the metric with the identity."""
        with torch.no_grad():
            if self.kind == "diagonal":
                self.weight.fill_(1.0)
            else:
                self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device).expand_as(self.weight))

    def forward(self, q_BTHD: Tensor) -> Tensor:
        """Return the queries times the metric, (B, T, H, D)."""
        if self.kind == "diagonal":
            return q_BTHD * self.weight
        # A single einsum would fix T in a compiled graph, because it chooses the order of the products by size.
        factored = torch.einsum("bthk,hmk->bthm", q_BTHD, self.weight)
        return torch.einsum("bthm,hml->bthl", factored, self.weight)

    def extra_repr(self) -> str:
        """Return the kind."""
        return self.kind
