"""A decoder language model of gated attention.

Legend: B batch, T positions, S attended positions, H heads, M model width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import (
    require_known_positions,
    require_known_tokens,
    require_learned_positions,
    require_positions_shape,
    require_size,
    require_tokens,
)
from tidegate.config import TransformerConfig
from tidegate.torch import generate
from tidegate.torch.attention import AttentionTrace, Traces
from tidegate.torch.block import TransformerStack
from tidegate.torch.cache import AttentionCache, KVCache, require_caches
from tidegate.torch.initialize import initialize
from tidegate.torch.masks import document_ids, require_documents
from tidegate.torch.precision import require_tensor


class TransformerLM(nn.Module):
    """A decoder language model: it maps tokens to the logits of each position's next token."""

    def __init__(
        self, config: TransformerConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        width, learned = config.d_model, config.positions == "learned"
        self.embedding = nn.Embedding(config.vocab_size, width, device=device, dtype=dtype)
        self.position_embedding = (
            nn.Embedding(config.max_length, width, device=device, dtype=dtype) if learned else None
        )
        self.stack = TransformerStack(config, device=device, dtype=dtype)
        # A tied head is not a module: one parameter with two names would become two on the way off the meta device.
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(width, config.vocab_size, bias=False, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize all weights; with a seed, variants share the weights that they have in common."""
        initialize(self, init=self.config.init, seed=seed)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        num_logits: int | None = None,
        traces: Traces | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V).

        Args:
            tokens: (B, T) integers in the vocabulary; other values are rejected on the CPU only.
            mask: bool (True = attend) or additive float, broadcasting to (B, H, T, S), in addition to causality.
            caches: One for each block, from `new_caches`; the tokens continue their positions.
            positions: (T,) or (B, T); None continues from the caches, learned positions start at 0 in each document.
            documents: (B, T) ids of packed documents, each contiguous, or `cu_seqlens` boundaries of a single packed
                row. No document sees another.
            num_logits: Return the logits of this number of last positions; None returns all.
            traces: Receives a trace of each block; see `trace`.
        """
        require_size("num_logits", num_logits, optional=True)
        require_tensor("tokens", tokens)
        require_tokens(tuple(tokens.shape), str(tokens.dtype))
        batch, num_positions = tokens.shape
        if positions is not None:
            require_tensor("positions", positions)
            require_positions_shape(tuple(positions.shape), batch, num_positions)
        if documents is not None:
            require_documents(documents, batch=batch, num_positions=num_positions)
            documents = document_ids(documents, num_positions=num_positions)
        x_BTM = look_up(self.embedding, tokens, require_known_tokens)
        if self.position_embedding is not None:
            if positions is None:
                positions = self._count_positions(tokens, caches, documents)
            x_BTM = x_BTM + look_up(self.position_embedding, positions, require_known_positions)
        x_BTM = self.stack(x_BTM, mask=mask, caches=caches, positions=positions, documents=documents, traces=traces)
        x_BTM = x_BTM if num_logits is None else x_BTM[:, -num_logits:]
        return F.linear(x_BTM, self.embedding.weight) if self.head is None else self.head(x_BTM)

    if TYPE_CHECKING:
        __call__ = forward

    def trace(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[AttentionCache] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        num_logits: int | None = None,
    ) -> tuple[Tensor, list[AttentionTrace]]:
        """Return the logits, and the trace of each block."""
        traces = Traces()
        logits_BTV = self(
            tokens,
            mask=mask,
            caches=caches,
            positions=positions,
            documents=documents,
            num_logits=num_logits,
            traces=traces,
        )
        return logits_BTV, traces

    generate = generate.generate

    def new_caches(self, max_length: int | None = None) -> list[KVCache]:
        """Return an empty cache for each block; see `KVCache` for `max_length`."""
        return [KVCache(max_length) for _ in self.stack.blocks]

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters, with or without the embeddings of tokens and positions.

        A head that is not tied always counts.
        """
        tables = () if embeddings else (self.embedding, self.position_embedding)
        left_out = sum(table.weight.numel() for table in tables if table is not None)
        return sum(parameter.numel() for parameter in self.parameters()) - left_out

    def flops_per_token(self, num_keys: float | None = None) -> float:
        """Return the FLOPs of one token's forward pass, in matrix products and attention.

        A token attends to `num_keys` positions; None is the mean over a sequence of `max_length`. A training step takes
        three times as many FLOPs: the backward pass has two products for each product of the forward pass.
        """
        if num_keys is None:
            longest = self.config.max_length
            window = min(self.config.window or longest, longest)
            num_keys = window * (2 * longest - window + 1) / (2 * longest)
        return self.stack.flops_per_token(num_keys) + 2 * self.config.vocab_size * self.config.d_model

    def _count_positions(
        self, tokens: Tensor, caches: Sequence[AttentionCache] | None, documents: Tensor | None
    ) -> Tensor:
        """Return learned positions (T,), or (B, T) that start at 0 in each document."""
        if caches is not None:
            require_caches(caches, len(self.stack.blocks))
        start = caches[0].length if caches else 0
        counted = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if documents is None:
            require_learned_positions(start + tokens.shape[1], self.config.max_length)
            return counted
        # Positions start at 0 in each document, so that a row may be longer than the table.
        begins_BT = F.pad(documents.diff(dim=1) != 0, (1, 0))
        return counted - torch.where(begins_BT, counted, 0).cummax(dim=1).values


def look_up(table: nn.Embedding, indices: Tensor, require_known: Callable[[int, int, int], None]) -> Tensor:
    """Return the table's rows; on the CPU, where PyTorch checks the indices, raise the error of `require_known`.

    `require_known` gets the smallest and the largest index, and the size of the table.
    """
    try:
        return table(indices)
    except IndexError:
        require_known(int(indices.min()), int(indices.max()), table.num_embeddings)
        raise
