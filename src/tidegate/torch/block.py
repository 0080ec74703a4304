"""Transformer blocks, and the stack of them in every model.

Legend: B batch, T positions, M model width, F inner width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tidegate._validation import require_choice
from tidegate.config import FeedForwardKind, StackConfig
from tidegate.torch.attention import GatedAttention, Traces
from tidegate.torch.cache import AttentionCache, require_caches
from tidegate.torch.kernel import inside_transform, silu
from tidegate.torch.rotary import RotaryTables


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
        """Return (B, T, M), computed for each position separately."""
        up_BTF = self.up_proj(x_BTM)
        inner_BTF = F.gelu(up_BTF) if self.gate_proj is None else silu(self.gate_proj(x_BTM)) * up_BTF
        return self.down_proj(inner_BTF)

    def flops_per_token(self) -> int:
        """Return the FLOPs of one position's forward pass, in matrix products."""
        return 2 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(
        self, config: StackConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(config, device, dtype)
        self.attention = GatedAttention.from_config(config.attention, device=device, dtype=dtype)
        self.feedforward_norm = _norm(config, device, dtype)
        self.feedforward = FeedForward(
            config.d_model,
            config.feedforward_width,
            kind=config.feedforward,
            bias=config.bias,
            device=device,
            dtype=dtype,
        )
        self.dropout = config.dropout

    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        traces: Traces | None = None,
    ) -> Tensor:
        """Return the residual stream after this block (B, T, M). The options are those of `GatedAttention.forward`."""
        y_BTM = self.attention(
            self.attention_norm(x_BTM), mask=mask, cache=cache, positions=positions, documents=documents, traces=traces
        )
        x_BTM = x_BTM + F.dropout(y_BTM, self.dropout, self.training)
        return x_BTM + F.dropout(self.feedforward(self.feedforward_norm(x_BTM)), self.dropout, self.training)

    if TYPE_CHECKING:
        __call__ = forward

    def flops_per_token(self, num_keys: float) -> float:
        """Return the FLOPs of one position's forward pass if it attends to `num_keys` positions."""
        return self.attention.flops_per_token(num_keys) + self.feedforward.flops_per_token()


class TransformerStack(nn.Module):
    """A sequence of blocks and a final norm."""

    def __init__(
        self, config: StackConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_blocks = config.checkpoint_blocks
        self.dropout = config.dropout
        self.blocks = nn.ModuleList(
            TransformerBlock(config.block(index), device=device, dtype=dtype) for index in range(config.num_layers)
        )
        self.norm = _norm(config, device, dtype)

    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        traces: Traces | None = None,
    ) -> Tensor:
        """Apply all blocks and the norm to the embeddings (B, T, M).

        The options are those of `GatedAttention.forward`, with one cache and one trace for each block.
        """
        if caches is not None:
            require_caches(caches, len(self.blocks))
        tables = self._rotary_tables(x_BTM, caches, positions)
        recompute = self.checkpoint_blocks and caches is None and traces is None and not inside_transform(x_BTM)
        x_BTM = F.dropout(x_BTM, self.dropout, self.training)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            call = partial(block, mask=mask, cache=cache, positions=tables, documents=documents, traces=traces)
            x_BTM = checkpoint(call, x_BTM, use_reentrant=False) if recompute else call(x_BTM)
        return self.norm(x_BTM)

    if TYPE_CHECKING:
        __call__ = forward

    def _rotary_tables(
        self, x_BTM: Tensor, caches: Sequence[AttentionCache] | None, positions: Tensor | None
    ) -> Tensor | RotaryTables | None:
        """Return the tables of all blocks if they have the same rotary embedding, else the positions unchanged."""
        layers = [block.attention for block in cast("Iterable[TransformerBlock]", self.blocks)]
        if any(layer.rotary != layers[0].rotary for layer in layers):
            return positions
        start = layers[0].claim(caches[0]) if caches else 0
        return layers[0].rotary_tables(x_BTM, positions, start=start)

    def flops_per_token(self, num_keys: float) -> float:
        """Return the FLOPs of one position's forward pass if it attends to `num_keys` positions."""
        return sum(block.flops_per_token(num_keys) for block in cast("Iterable[TransformerBlock]", self.blocks))


def _norm(
    config: StackConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-6, device=device, dtype=dtype)
    return nn.LayerNorm(config.d_model, bias=config.bias, device=device, dtype=dtype)
