"""How an attention module is built: its sizes, its projections, and the columns in which their results hold the heads.

Legend: B batch, T positions, M model width, H query heads, G key/value heads, D head width, W width of a projection.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tidegate.sizes import HeadShape

PartKind: TypeAlias = Literal["query", "key", "value"]
Source: TypeAlias = Literal["input", "context", "inner"]
"""What a projection is given: the layer's input, what cross-attention attends to, or something made inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns `start + h·stride + d` of head h and channel d: all of a projection, a slice, or a regular comb."""

    start: int
    stride: int
    """Columns from one head to the next: the head's width, or more where other parts stand between the heads."""
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, heads: Sequence[Sequence[int]], *, width: int) -> Columns | None:
        """Describe these columns, head by head, in a result of this width; None if their layout is not regular."""
        start, head_dim = heads[0][0], len(heads[0])
        stride = heads[1][0] - start if len(heads) > 1 else head_dim
        layout = cls(start=start, stride=stride, num_heads=len(heads), head_dim=head_dim)
        if stride < head_dim or layout.heads() != [list(head) for head in heads]:
            return None
        first, rest = layout._block()
        whole = stride == head_dim or (rest + head_dim <= stride and first + len(heads) * stride <= width)
        return layout if whole else None

    def heads(self) -> list[list[int]]:
        """List the columns of each head."""
        starts = (self.start + head * self.stride for head in range(self.num_heads))
        return [list(range(start, start + self.head_dim)) for start in starts]

    def take(self, result: Tensor) -> Tensor:
        """Take the heads (B, T, H, D) out of a projection's result (B, T, W)."""
        if self.stride == self.head_dim:
            part = result.narrow(-1, self.start, self.num_heads * self.head_dim)
            return part.unflatten(-1, (self.num_heads, self.head_dim))
        first, rest = self._block()
        blocks = result.narrow(-1, first, self.num_heads * self.stride).unflatten(-1, (self.num_heads, self.stride))
        return blocks.narrow(-1, rest, self.head_dim)

    def put(self, result: Tensor, heads: Tensor) -> Tensor:
        """Return a new result (B, T, W) with these heads (B, T, H, D) in their columns."""
        if self.stride == self.head_dim:
            stop = self.start + self.num_heads * self.head_dim
            return _replace_columns(result, self.start, heads.flatten(-2), stop)
        first, rest = self._block()
        stop = first + self.num_heads * self.stride
        blocks = result.narrow(-1, first, stop - first).unflatten(-1, (self.num_heads, self.stride))
        inner = _replace_columns(blocks, rest, heads, rest + self.head_dim).flatten(-2)
        return _replace_columns(result, first, inner, stop)

    def _block(self) -> tuple[int, int]:
        """Return the column at which the blocks of one stride begin, and that at which a head begins in its block."""
        return self.start // self.stride * self.stride, self.start % self.stride


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """An attribute of a module that holds a projection. The projection may be exchanged: adapters wrap it in place."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The projection that the slot holds now."""
        return getattr(self.owner, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Queries, keys or values as a projection gives them, before norms and rotation."""

    slot: Slot
    columns: Columns
    order: int
    """The number of the projection among those of its layer, in the order in which they run."""
    source: Source = "input"
    spans_cache: bool = False
    """Whether the projection is given all positions of the cache, not the new ones alone, as latent attention does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """The sizes and projections of one attention module."""

    name: str
    """Its path in the model."""
    module: nn.Module
    input_name: str
    """The keyword of its input, for calls without positional arguments."""
    shape: HeadShape
    parts: dict[PartKind, Part] = field(default_factory=dict[PartKind, Part])
    """Query, key and value, as far as each is the result of one projection."""
    output: Slot | None = None
    """The output projection, which may stand outside the module; None if none takes the heads' outputs unchanged."""
    cross: bool = False
    """Whether it attends to something else than its input."""
    in_function: bool = True
    """Whether a gate at the output acts inside the attention function; else it acts before the output projection."""


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's weights, if it has any; quantized modules unpack theirs in a method."""
    weight: Any = getattr(module, "weight", None)
    weight = weight() if inspect.ismethod(weight) else weight
    return weight if isinstance(weight, Tensor) else None


def _replace_columns(whole: Tensor, start: int, part: Tensor, stop: int) -> Tensor:
    """Replace the columns from start to stop."""
    width = whole.shape[-1]
    if start == 0 and stop == width:
        return part
    return torch.cat((whole.narrow(-1, 0, start), part, whole.narrow(-1, stop, width - stop)), dim=-1)
