"""Keys and values of the positions that have gone by.

Legend: B batch, T new positions, S all positions, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from tidegate.sizes import require_size


class AttentionCache(Protocol):
    """What `GatedAttention` asks of a cache: `KVCache`, or one layer of a cache of transformers."""

    @property
    def length(self) -> int:
        """Positions that it holds."""
        ...

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Append the new positions; returns the keys and values to attend to, (B, G, S, D)."""
        ...


@final
class KVCache:
    """The cache of one attention layer: rotated keys and gated values, `G` heads of each.

    Without a `max_length` it grows by concatenation, which gradients pass through. With one, it is allocated at the
    first update and written in place: faster, and for inference only. Positions see those that have gone by and those
    that come in the same call, so that a layer that is not causal gives chunks what the whole would not.
    """

    def __init__(self, max_length: int | None = None) -> None:
        require_size("max_length", max_length, otherwise="or None for a cache that grows")
        self.max_length = max_length
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(held.numel() * held.element_size() for held in (self._key, self._value) if held is not None)

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions; returns the keys and values of all S of them, (B, G, S, D)."""
        if self._key is not None and not _alike(key_BGTD, self._key):
            raise ValueError(
                f"cache holds {_kind(self._key)}; got {_kind(key_BGTD)}. Each layer and each batch needs its own."
            )
        if self.max_length is None:
            self._key, self._value = _append(self._key, key_BGTD), _append(self._value, value_BGTD)
            self.length = self._key.shape[2]
            return self._key, self._value
        return self._write(key_BGTD, value_BGTD, self.max_length)

    def _write(self, key_BGTD: Tensor, value_BGTD: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_BGTD.shape[2]
        if end > max_length:
            raise ValueError(
                f"cache has room for max_length={max_length} positions; {end} are needed. "
                "Make it longer, or leave max_length out."
            )
        if torch.is_grad_enabled() and (key_BGTD.requires_grad or value_BGTD.requires_grad):
            raise RuntimeError(
                "A preallocated cache is written in place, which gradients cannot pass through. "
                "Use torch.no_grad(), or KVCache() without max_length."
            )
        if self._key is None or self._value is None:
            self._key, self._value = _room(key_BGTD, max_length), _room(value_BGTD, max_length)
        self._key[:, :, start:end] = key_BGTD
        self._value[:, :, start:end] = value_BGTD
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end]


def _alike(new: Tensor, held: Tensor) -> bool:
    return new.shape[:2] == held.shape[:2] and new.shape[3] == held.shape[3] and new.dtype == held.dtype


def _kind(x_BGTD: Tensor) -> str:
    batch, heads, _, width = x_BGTD.shape
    return f"a batch of {batch} with {heads} heads of width {width} in {str(x_BGTD.dtype).removeprefix('torch.')}"


def _append(held: Tensor | None, new: Tensor) -> Tensor:
    return new if held is None else torch.cat((held, new), dim=2)


def _room(like: Tensor, max_length: int) -> Tensor:
    batch, heads, _, width = like.shape
    return like.new_empty(batch, heads, max_length, width)
