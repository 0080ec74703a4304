"""Adapters from the caches of transformers to the cache of our attention layer.

Legend: B batch, T new positions, S attended positions, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from tidegate._validation import InputError
from tidegate.torch.cache import AttentionCache


@final
class CachedKeys:
    """The keys that the layers see in one call, and their order.

    `GatedAttention` expects the queries at the end of the keys. In a dynamic cache they are there. A static cache has a
    fixed number of slots that fill from the front, and shapes must not depend on the number of filled slots:

    - an empty cache gives only the new keys;
    - for a single query without a window the slots keep their order, and the mask hides the empty ones;
    - otherwise the slots are rotated until the newest is last, and the mask hides the empty ones in front.
    """

    def __init__(self, cache: Cache | None, num_queries: int, *, windowed: bool, device: torch.device) -> None:
        self.num_queries = num_queries
        self.seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
        """Number of cached positions; for a static cache in use a tensor, which must not be read on the host."""
        self._cache, self._device = cache, device
        self._num_slots: int | None = None
        self._order: Tensor | None = None
        if cache is None or not cache.is_compileable:
            return
        self._num_slots = cache.get_max_length()
        if not self._fresh and (num_queries > 1 or windowed):
            slots = torch.arange(self._num_slots, device=device)
            self._order = (slots + self.seen + num_queries) % self._num_slots

    def layers(self, num_layers: int) -> list[AttentionCache] | None:
        """Return the cache of each layer, or None without a cache."""
        if self._cache is None:
            return None
        return [LayerCache(self._cache, index, self) for index in range(num_layers)]

    def mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """Return a mask of the keys, besides causality and window, in the order of the layers; None hides nothing.

        Args:
            attention_mask: (B, S) with 0 at padding, where S includes cached positions; or bool or additive,
                broadcasting to (B, H, T, S), where S includes all slots of a static cache.

        Returns:
            A mask that broadcasts to (B, H, T, S).

        Raises:
            InputError: `attention_mask` is (B, S) with another number of positions.
        """
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = self._by_token(attention_mask)
        if self._num_slots is None:
            return attention_mask
        if self._fresh:
            return None if attention_mask is None else attention_mask[..., : self.num_queries]
        filled_S = torch.arange(self._num_slots, device=self._device) < self.seen + self.num_queries
        if attention_mask is None:
            mask = filled_S[None, None, None, :]
        elif attention_mask.dtype == torch.bool:
            mask = attention_mask & filled_S
        else:
            mask = torch.where(filled_S, attention_mask, float("-inf"))
        return mask if self._order is None else mask[..., self._order]

    def arrange(self, held_BGSD: Tensor, new_BGTD: Tensor) -> Tensor:
        """Return the keys or values that a layer attends to, from those in its cache after the update."""
        if self._num_slots is None:
            return held_BGSD
        if self._fresh:
            return new_BGTD
        return held_BGSD if self._order is None else held_BGSD[:, :, self._order]

    @property
    def _fresh(self) -> bool:
        return isinstance(self.seen, int) and self.seen == 0

    def _by_token(self, attention_mask: Tensor) -> Tensor | None:
        """Return a mask (B, 1, 1, S) bool, of all slots if the cache is static; None if no token is padding."""
        given = attention_mask.shape[1]
        if self._num_slots is None and given != self.seen + self.num_queries:
            expected = f"of {self.seen + self.num_queries} positions, including the {self.seen} in the cache"
            raise InputError("attention_mask", expected=expected, got=given)
        # Reading the values makes a device wait, but saves the whole (T, S) mask; a compiled graph cannot read them.
        if not torch.compiler.is_compiling() and bool(attention_mask.all()):
            return None
        visible = attention_mask != 0
        if self._num_slots is not None:
            visible = F.pad(visible, (0, self._num_slots - given))
        return visible[:, None, None, :]


@final
class LayerCache:
    """One layer of a transformers cache, as an `AttentionCache`."""

    def __init__(self, cache: Cache, layer: int, keys: CachedKeys) -> None:
        self._cache = cache
        self._layer = layer
        self._keys = keys

    @property
    def length(self) -> int:
        """Return the number of cached positions."""
        return self._cache.get_seq_length(self._layer)

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions; return the keys and values to attend to, (B, G, S, D)."""
        key_BGSD, value_BGSD = self._cache.update(key_BGTD, value_BGTD, self._layer)
        return self._keys.arrange(key_BGSD, key_BGTD), self._keys.arrange(value_BGSD, value_BGTD)
