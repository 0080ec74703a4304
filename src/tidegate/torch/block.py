"""Transformer blocks, and a stack of them: what every model is built from.

Legend: B batch, T positions, M model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tidegate.config import StackConfig
from tidegate.torch.attention import AttentionTrace, GatedAttention
from tidegate.torch.cache import AttentionCache, require_caches
from tidegate.torch.feedforward import FeedForward
from tidegate.torch.kernel import inside_transform
from tidegate.torch.rotary import RotaryTables


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), and of that x + feedforward(norm(x))."""

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
    ) -> Tensor:
        """Return the stream after this block (B, T, M). The options are those of `GatedAttention.forward`."""
        y_BTM = self.attention(
            self.attention_norm(x_BTM), mask=mask, cache=cache, positions=positions, documents=documents
        )
        return self._add(x_BTM, y_BTM)

    if TYPE_CHECKING:
        __call__ = forward

    def trace(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, AttentionTrace]:
        """Return what `forward` returns, and the attention's trace."""
        y_BTM, trace = self.attention.trace(
            self.attention_norm(x_BTM), mask=mask, cache=cache, positions=positions, documents=documents
        )
        return self._add(x_BTM, y_BTM), trace

    def _add(self, x_BTM: Tensor, y_BTM: Tensor) -> Tensor:
        """Add the attention's result to the stream, and the feed-forward layer's to that."""
        x_BTM = x_BTM + F.dropout(y_BTM, self.dropout, self.training)
        return x_BTM + F.dropout(self.feedforward(self.feedforward_norm(x_BTM)), self.dropout, self.training)

    def flops_per_token(self, num_keys: float) -> float:
        """Multiplications and additions of one position's forward pass, when it attends to `num_keys` positions."""
        return self.attention.flops_per_token(num_keys) + self.feedforward.flops_per_token()


class TransformerStack(nn.Module):
    """Blocks one after another, and a norm at the end."""

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
    ) -> Tensor:
        """Pass the embeddings (B, T, M) through all blocks and the norm.

        The options are those of `GatedAttention.forward`, with a cache for each block.
        """
        options = self._block_options(x_BTM, caches, positions) | {"mask": mask, "documents": documents}
        recompute = self.checkpoint_blocks and caches is None and not inside_transform(x_BTM)
        x_BTM = F.dropout(x_BTM, self.dropout, self.training)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            if recompute:
                x_BTM = checkpoint(partial(block, **options), x_BTM, use_reentrant=False)
            else:
                x_BTM = block(x_BTM, cache=cache, **options)
        return self.norm(x_BTM)

    if TYPE_CHECKING:
        __call__ = forward

    def trace(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, list[AttentionTrace]]:
        """Return what `forward` returns, and each block's trace."""
        options = self._block_options(x_BTM, caches, positions) | {"mask": mask, "documents": documents}
        traces: list[AttentionTrace] = []
        x_BTM = F.dropout(x_BTM, self.dropout, self.training)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x_BTM, trace = cast("TransformerBlock", block).trace(x_BTM, cache=cache, **options)
            traces.append(trace)
        return self.norm(x_BTM), traces

    def _block_options(
        self, x_BTM: Tensor, caches: Sequence[AttentionCache] | None, positions: Tensor | None
    ) -> dict[str, Any]:
        """Return the positions for each block: as rotary tables if all blocks have the same embedding."""
        if caches is not None:
            require_caches(caches, len(self.blocks))
        layers = [block.attention for block in cast("Iterable[TransformerBlock]", self.blocks)]
        if any(layer.rotary != layers[0].rotary for layer in layers):
            return {"positions": positions}
        start = layers[0].claim(caches[0]) if caches else 0
        return {"positions": layers[0].rotary_tables(x_BTM, positions, start=start)}

    def flops_per_token(self, num_keys: float) -> float:
        """Multiplications and additions of one position's forward pass, when it attends to `num_keys` positions."""
        return sum(block.flops_per_token(num_keys) for block in cast("Iterable[TransformerBlock]", self.blocks))


def _norm(
    config: StackConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-6, device=device, dtype=dtype)
    return nn.LayerNorm(config.d_model, bias=config.bias, device=device, dtype=dtype)
