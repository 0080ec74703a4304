"""The caches of transformers, as our attention layer takes a cache.

Legend: B batch, T new positions, S attended positions, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from tidegate.torch.cache import AttentionCache


@final
class CachedKeys:
    """Which keys the layers see in one call, and in which order.

    `GatedAttention` takes the queries for the last of the keys. In a cache that grows they are. A static cache has a
    fixed number of slots that fill from the front, and sizes must not depend on how many are filled:

    - empty, it gives the new keys alone;
    - for a single query without a window it gives the slots as they lie, and the mask hides those that are empty;
    - otherwise it gives the slots turned until the newest is last, and the mask hides the empty ones in front.
    """

    def __init__(self, cache: Cache | None, num_queries: int, *, windowed: bool, device: torch.device) -> None:
        self.num_queries = num_queries
        self.seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
        """Positions that have gone by; of a static cache in use a tensor, which must not be read on the host."""
        self._cache = cache
        self._num_slots: int | None = None
        self._order: Tensor | None = None
        if cache is None or not cache.is_compileable:
            return
        self._num_slots = cache.get_max_length()
        if not self._fresh and (num_queries > 1 or windowed):
            slots = torch.arange(self._num_slots, device=device)
            self._order = (slots + self.seen + num_queries) % self._num_slots

    def layers(self, num_layers: int) -> list[AttentionCache] | None:
        """The cache of each layer, or None without a cache."""
        if self._cache is None:
            return None
        return [LayerCache(self._cache, index, self) for index in range(num_layers)]

    def mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """What hides keys, beside causality and window, in the order in which the layers see them.

        attention_mask : (B, S) with 0 at padding, S counting cached positions; or broadcasting to (B, H, T, S), bool
                         or added to the scores, where a static cache counts all of its slots
        returns        : broadcasts to (B, H, T, S); None hides nothing
        """
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = self._by_token(attention_mask)
        if self._num_slots is None:
            return attention_mask
        if self._fresh:
            return None if attention_mask is None else attention_mask[..., : self.num_queries]
        filled_S = torch.arange(self._num_slots, device=self._device(attention_mask)) < self.seen + self.num_queries
        if attention_mask is None:
            mask = filled_S[None, None, None, :]
        elif attention_mask.dtype == torch.bool:
            mask = attention_mask & filled_S
        else:
            mask = torch.where(filled_S, attention_mask, float("-inf"))
        return mask if self._order is None else mask[..., self._order]

    def arrange(self, held_BGSD: Tensor, new_BGTD: Tensor) -> Tensor:
        """Return the keys or values that a layer attends to, of those that its cache holds after the update."""
        if self._num_slots is None:
            return held_BGSD
        if self._fresh:
            return new_BGTD
        return held_BGSD if self._order is None else held_BGSD[:, :, self._order]

    @property
    def _fresh(self) -> bool:
        return isinstance(self.seen, int) and self.seen == 0

    def _by_token(self, attention_mask: Tensor) -> Tensor | None:
        """(B, 1, 1, S) bool, of all slots if the cache is static; None where no token is padding."""
        given = attention_mask.shape[1]
        if self._num_slots is None and given != self.seen + self.num_queries:
            raise ValueError(
                f"attention_mask must say of {self.seen + self.num_queries} positions whether they are tokens, the "
                f"{self.seen} in the cache included; got {given}."
            )
        # A look at the values makes a device wait, and saves the whole (T, S) mask; a compiled graph cannot look.
        if not torch.compiler.is_compiling() and bool(attention_mask.all()):
            return None
        visible = attention_mask != 0
        if self._num_slots is not None:
            visible = F.pad(visible, (0, self._num_slots - given))
        return visible[:, None, None, :]

    def _device(self, attention_mask: Tensor | None) -> torch.device:
        if attention_mask is not None:
            return attention_mask.device
        assert isinstance(self.seen, Tensor)
        return self.seen.device


@final
class LayerCache:
    """One layer of a transformers cache, as an `AttentionCache`."""

    def __init__(self, cache: Cache, layer: int, keys: CachedKeys) -> None:
        self._cache = cache
        self._layer = layer
        self._keys = keys

    @property
    def length(self) -> int:
        """Positions that it holds."""
        return self._cache.get_seq_length(self._layer)

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions; returns the keys and values to attend to, (B, G, S, D)."""
        key_BGSD, value_BGSD = self._cache.update(key_BGTD, value_BGTD, self._layer)
        return self._keys.arrange(key_BGSD, key_BGTD), self._keys.arrange(value_BGSD, value_BGTD)
