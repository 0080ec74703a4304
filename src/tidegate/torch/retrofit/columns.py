"""Where the heads of a query, key or value stand in the result of a projection.

Legend: B batch, T positions, H heads, D head width, W width of the projection's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns `start + h·stride + d` for head h and channel d: a whole projection, a slice of one, or every so many."""

    start: int
    stride: int
    """Columns from one head to the next: the head's width, or more where other parts stand between the heads."""
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, heads: Sequence[Sequence[int]], *, width: int) -> Columns | None:
        """The layout in a result of this width that has exactly these columns, head by head; None if there is none."""
        start, head_dim = heads[0][0], len(heads[0])
        stride = heads[1][0] - start if len(heads) > 1 else head_dim
        layout = cls(start=start, stride=stride, num_heads=len(heads), head_dim=head_dim)
        if stride < head_dim or layout.heads() != [list(head) for head in heads]:
            return None
        first, rest = layout._block()
        whole = stride == head_dim or (rest + head_dim <= stride and first + len(heads) * stride <= width)
        return layout if whole else None

    def heads(self) -> list[list[int]]:
        """The columns of each head."""
        starts = (self.start + head * self.stride for head in range(self.num_heads))
        return [list(range(start, start + self.head_dim)) for start in starts]

    def take(self, result: Tensor) -> Tensor:
        """The heads, (B, T, H, D), of a projection's result (B, T, W)."""
        if self.stride == self.head_dim:
            part = result.narrow(-1, self.start, self.num_heads * self.head_dim)
            return part.unflatten(-1, (self.num_heads, self.head_dim))
        first, rest = self._block()
        blocks = result.narrow(-1, first, self.num_heads * self.stride).unflatten(-1, (self.num_heads, self.stride))
        return blocks.narrow(-1, rest, self.head_dim)

    def put(self, result: Tensor, heads: Tensor) -> Tensor:
        """The result (B, T, W) with these heads (B, T, H, D) in their place, as a new tensor."""
        if self.stride == self.head_dim:
            stop = self.start + self.num_heads * self.head_dim
            return _between(result, self.start, heads.flatten(-2), stop)
        first, rest = self._block()
        stop = first + self.num_heads * self.stride
        blocks = result.narrow(-1, first, stop - first).unflatten(-1, (self.num_heads, self.stride))
        inner = _between(blocks, rest, heads, rest + self.head_dim).flatten(-2)
        return _between(result, first, inner, stop)

    def _block(self) -> tuple[int, int]:
        """Where the blocks of one stride each begin, and where a head begins in its block."""
        return self.start // self.stride * self.stride, self.start % self.stride


def _between(whole: Tensor, start: int, part: Tensor, stop: int) -> Tensor:
    """The whole with its last axis from start to stop replaced."""
    width = whole.shape[-1]
    if start == 0 and stop == width:
        return part
    return torch.cat((whole.narrow(-1, 0, start), part, whole.narrow(-1, stop, width - stop)), dim=-1)
