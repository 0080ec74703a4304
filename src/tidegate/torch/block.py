"""Transformer blocks, and a stack of them: what every model is built from.

Legend: B batch, T positions, M model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, overload

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

    @overload
    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        return_trace: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        return_trace: Literal[True],
    ) -> tuple[Tensor, AttentionTrace]: ...
    @overload
    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        return_trace: bool,
    ) -> Tensor | tuple[Tensor, AttentionTrace]: ...
    def forward(
        self,
        x_BTM: Tensor,
        *,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        return_trace: bool = False,
    ) -> Tensor | tuple[Tensor, AttentionTrace]:
        """Return the stream after this block (B, T, M), and the attention's trace if asked for.

        The options are those of `GatedAttention.forward`.
        """
        attended = self.attention(
            self.attention_norm(x_BTM),
            mask=mask,
            cache=cache,
            positions=positions,
            documents=documents,
            return_trace=return_trace,
        )
        y_BTM, trace = attended if isinstance(attended, tuple) else (attended, None)
        x_BTM = x_BTM + F.dropout(y_BTM, self.dropout, self.training)
        x_BTM = x_BTM + F.dropout(self.feedforward(self.feedforward_norm(x_BTM)), self.dropout, self.training)
        return x_BTM if trace is None else (x_BTM, trace)

    if TYPE_CHECKING:
        __call__ = forward

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
        return_traces: bool = False,
    ) -> tuple[Tensor, list[AttentionTrace]]:
        """Pass the embeddings (B, T, M) through all blocks and the norm; returns also the traces if asked for.

        The options are those of `GatedAttention.forward`, with a cache for each block.
        """
        if caches is not None:
            require_caches(caches, len(self.blocks))
        recompute = self.checkpoint_blocks and caches is None and not return_traces and not inside_transform(x_BTM)
        layers = [block.attention for block in cast("Iterable[TransformerBlock]", self.blocks)]
        shared = all(layer.rotary == layers[0].rotary for layer in layers)
        start = layers[0].claim(caches[0]) if caches else 0
        tables = layers[0].rotary_tables(x_BTM, positions, start=start) if shared else positions
        options = {"mask": mask, "positions": tables, "documents": documents}
        traces: list[AttentionTrace] = []
        x_BTM = F.dropout(x_BTM, self.dropout, self.training)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            if recompute:
                x_BTM = checkpoint(partial(block, **options), x_BTM, use_reentrant=False)
            elif return_traces:
                x_BTM, trace = block(x_BTM, cache=cache, return_trace=True, **options)
                traces.append(trace)
            else:
                x_BTM = block(x_BTM, cache=cache, **options)
        return self.norm(x_BTM), traces

    if TYPE_CHECKING:
        __call__ = forward

    def flops_per_token(self, num_keys: float) -> float:
        """Multiplications and additions of one position's forward pass, when it attends to `num_keys` positions."""
        return sum(block.flops_per_token(num_keys) for block in cast("Iterable[TransformerBlock]", self.blocks))


def _norm(
    config: StackConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-6, device=device, dtype=dtype)
    return nn.LayerNorm(config.d_model, bias=config.bias, device=device, dtype=dtype)
