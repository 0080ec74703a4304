"""The options of one attention layer in JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidegate._refusals import require_layer_options
from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape
from tidegate.tensors.rotary import Rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """The options of one attention layer, named as the PyTorch layer names them. Hashable, so static to `jit`."""

    d_model: int
    """Width of the input and of the output."""
    num_heads: int
    """Query heads."""
    gate: GateLike = "bma"
    """The layer's gates; whatever spells them is kept as `Gates`."""
    num_kv_heads: int | None = None
    """Key/value heads, dividing `num_heads`; None has as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None is `d_model / num_heads`."""
    dropout: float = 0.0
    """Share of the attention weights that is dropped in training; it builds the score matrix."""
    bias: bool = False
    """Whether the four projections have biases."""
    rope: Rotary | bool | None = None
    """A rotary embedding; True is the usual one."""
    qk_norm: bool = False
    """Whether queries and keys pass a root-mean-square norm, one scale for all heads."""
    window: int | None = None
    """Keys that a query sees, itself included; back alone if causal, else to both sides."""
    metric: Literal["diagonal", "learned"] | None = None
    """A metric per head that starts as the identity."""
    temperature: float = 1.0
    """Divides the scores."""
    recompute_gate: bool = False
    """Compute gates again in the backward pass instead of keeping what they made."""

    def __post_init__(self) -> None:
        shape = self.shape
        object.__setattr__(self, "gate", Gates.parse(self.gate))
        if not isinstance(self.rope, bool | Rotary | None):
            raise TypeError(f"rope must be a Rotary, True, False or None; got {self.rope!r}.")
        object.__setattr__(self, "rope", Rotary() if self.rope is True else self.rope or None)
        require_layer_options(dropout=self.dropout, window=self.window, temperature=self.temperature)
        if self.metric not in ("diagonal", "learned", None):
            raise ValueError(f"metric must be 'diagonal', 'learned' or None; got {self.metric!r}.")
        if self.rotary is not None:
            self.rotary.width(shape.head_dim)
        for gate in self.gates:
            gate.read_width(shape)

    @property
    def gates(self) -> Gates:
        """The gates, parsed."""
        return Gates.parse(self.gate)

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding, if there is one."""
        return self.rope if isinstance(self.rope, Rotary) else None

    @property
    def shape(self) -> HeadShape:
        """The layer's sizes, the defaults filled in."""
        return HeadShape.of(
            d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.shape.head_dim**-0.5 / self.temperature
