"""The structure of an attention module: sizes, projections, and the columns of each head in their results.

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
"""The input of a projection: the layer's input, the context of cross-attention, or a tensor computed inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns `start + h·stride + d` of head h and channel d."""

    start: int
    stride: int
    """Columns from one head to the next: the head's width, or more if there are other parts between heads."""
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, heads: Sequence[Sequence[int]], *, width: int) -> Columns | None:
        """Return the layout of each head's columns in a result of this width; None if it is not regular."""
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
        first, rest = self._block()
        blocks = result.narrow(-1, first, self.num_heads * self.stride).unflatten(-1, (self.num_heads, self.stride))
        return blocks.narrow(-1, rest, self.head_dim)

    def put(self, result: Tensor, heads: Tensor) -> Tensor:
        """Return a new result (B, T, W) with these heads (B, T, H, D) in their columns."""
        first, rest = self._block()
        width = self.num_heads * self.stride
        blocks = result.narrow(-1, first, width).unflatten(-1, (self.num_heads, self.stride))
        return _replace_columns(result, first, _replace_columns(blocks, rest, heads).flatten(-2))

    def _block(self) -> tuple[int, int]:
        """Return the first column of the blocks of one stride, and the first column of a head in its block."""
        rest = 0 if self.stride == self.head_dim else self.start % self.stride
        return self.start - rest, rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """An attribute of a module that contains a projection, which may be replaced: adapters wrap it in place."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """Return the projection that is in the slot now."""
        return getattr(self.owner, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Queries, keys or values in the result of a projection, before norms and rotation."""

    slot: Slot
    columns: Columns
    order: int
    """The index of the projection among those of its layer, in the order in which they run."""
    source: Source = "input"
    spans_cache: bool = False
    """Whether the projection receives all positions of the cache, as in latent attention, not only the new ones."""


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
    """Query, key and value, if each is the result of one projection."""
    output: Slot | None = None
    """The output projection, which may be outside the module; None if none takes the heads' outputs unchanged."""
    cross: bool = False
    """Whether it is cross-attention."""
    in_function: bool = True
    """Whether a gate at the output acts inside the attention function, or else before the output projection."""


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's weights, if it has any; quantized modules unpack theirs in a method."""
    weight: Any = getattr(module, "weight", None)
    weight = weight() if inspect.ismethod(weight) else weight
    return weight if isinstance(weight, Tensor) else None


def _replace_columns(whole: Tensor, start: int, part: Tensor) -> Tensor:
    """Return the tensor with the part in place of its columns from `start` on."""
    stop, width = start + part.shape[-1], whole.shape[-1]
    if part.shape[-1] == width:
        return part
    return torch.cat((whole.narrow(-1, 0, start), part, whole.narrow(-1, stop, width - stop)), dim=-1)
