"""What an attention module is made of: its sizes, and the projections that make its queries, keys, values and results.

Legend: M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import nn

from tidegate.sizes import HeadShape
from tidegate.torch.retrofit.columns import Columns

PartKind: TypeAlias = Literal["query", "key", "value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A place in a model where a projection stands. What stands there may change: adapters put themselves around it."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """What stands there now."""
        return getattr(self.owner, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Queries, keys or values as a projection of the layer's input gives them, before norms and rotation."""

    spot: Spot
    columns: Columns
    order: int
    """The place of the projection among those of its layer, in the order in which they run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """One attention module."""

    name: str
    """Its path in the model."""
    module: nn.Module
    input_name: str
    """The keyword under which it takes its input, where that is not the first argument."""
    shape: HeadShape
    parts: dict[PartKind, Part] = field(default_factory=dict[PartKind, Part])
    """Those of query, key and value that one projection of the layer's input gives."""
    output: Spot | None = None
    """The projection that takes the heads' outputs side by side; it may stand outside the module."""
