"""Keys and values of previous positions.

Legend: B batch, T new positions, S all positions, G key/value heads, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from tidegate._validation import InputError, require_num_caches, require_size


class AttentionCache(Protocol):
    """The interface of a cache to `GatedAttention`: `KVCache`, or one layer of a cache of transformers."""

    @property
    def length(self) -> int:
        """Positions that it holds."""
        ...

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Append the new positions, and return the keys and values to attend to, (B, G, S, D)."""
        ...


class CacheOwner:
    """The identity of a layer, which does not keep it alive; a copy of a layer has its own."""


@final
class KVCache:
    """The cache of one attention layer: rotated keys and gated values, `G` heads of each.

    Without a `max_length` it grows by concatenation, which is differentiable. With one, it is allocated at the first
    update and written in place: faster, and for inference only. Queries see the cached positions and those of the same
    call, so that a layer that is not causal gives different results for chunks than for the whole sequence.

    It belongs to the first layer that fills it, and rejects every other layer, including copies of that layer. A deep
    copy belongs to the same layer, or to the layer's copy if both are copied together; an unpickled cache belongs to
    the first layer that uses it.
    """

    def __init__(self, max_length: int | None = None) -> None:
        require_size("max_length", max_length, optional=True)
        self._max_length = max_length
        self._length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._owner: CacheOwner | None = None

    @property
    def length(self) -> int:
        """Return the number of cached positions."""
        return self._length

    @property
    def max_length(self) -> int | None:
        """Return the maximum number of positions; None grows."""
        return self._max_length

    @property
    def num_bytes(self) -> int:
        """Return the allocated memory in bytes."""
        return sum(held.numel() * held.element_size() for held in (self._key, self._value) if held is not None)

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, so that the next call continues from there.

        The cache still belongs to its layer and its batch, and keeps its memory if it was preallocated.
        """
        if type(length) is not int or not 0 <= length <= self._length:
            raise InputError("length", expected=f"from 0 to {self._length}, the cached positions", got=length)
        if self._max_length is None and self._key is not None and self._value is not None:
            self._key, self._value = self._key[:, :, :length], self._value[:, :, :length]
        self._length = length

    def claim(self, owner: CacheOwner) -> None:
        """Raise InputError unless the cache belongs to this layer or to none; layers call this before they use it."""
        if self._owner is not owner:
            if self._owner is not None and self._key is not None:
                hint = "It holds another layer's keys and values. Give each layer its own, as new_caches() does."
                raise InputError("cache", expected="of this layer", hint=hint)
            self._owner = owner

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions, and return the keys and values of all S positions, (B, G, S, D)."""
        cached, new = self._key, key_BGTD
        if cached is not None and (
            cached.shape[:2] != new.shape[:2] or cached.shape[3:] != new.shape[3:] or cached.dtype != new.dtype
        ):
            hint = f"It holds {_kind(cached)}. Each layer and each batch needs its own."
            raise InputError("cache", expected=f"for {_kind(new)}", hint=hint)
        if self._max_length is None:
            if self._key is not None and self._value is not None:
                key_BGTD = torch.cat((self._key, key_BGTD), dim=2)
                value_BGTD = torch.cat((self._value, value_BGTD), dim=2)
            self._key, self._value, self._length = key_BGTD, value_BGTD, key_BGTD.shape[2]
            return self._key, self._value
        return self._write(key_BGTD, value_BGTD, self._max_length)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the owner, which is a different object after unpickling."""
        return vars(self) | {"_owner": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """Copy keys and values, and keep the owner."""
        twin = KVCache(self._max_length)
        memo[id(self)] = twin
        twin._length = self._length
        twin._key, twin._value = copy.deepcopy((self._key, self._value), memo)
        twin._owner = memo.get(id(self._owner), self._owner)
        return twin

    def _write(self, key_BGTD: Tensor, value_BGTD: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        start, end = self._length, self._length + key_BGTD.shape[2]
        if end > max_length:
            hint = "Or leave it out."
            raise InputError("max_length", expected=f"at least {end} for these positions", got=max_length, hint=hint)
        if torch.is_grad_enabled() and (key_BGTD.requires_grad or value_BGTD.requires_grad):
            raise RuntimeError(
                "A preallocated cache is written in place, which gradients cannot pass through. "
                "Use torch.no_grad(), or KVCache() without max_length."
            )
        if self._key is None or self._value is None:
            self._key, self._value = (
                new.new_empty(*new.shape[:2], max_length, new.shape[3]) for new in (key_BGTD, value_BGTD)
            )
        self._key[:, :, start:end] = key_BGTD
        self._value[:, :, start:end] = value_BGTD
        self._length = end
        return self._key[:, :, :end], self._value[:, :, :end]


def require_caches(caches: Sequence[AttentionCache], num_blocks: int) -> None:
    """Raise TypeError for anything but a sequence, InputError unless it has a cache for each block."""
    if not isinstance(caches, Sequence):
        raise TypeError(
            f"caches must be a list with a KVCache for each block, got {type(caches).__name__}. "
            "Make it with new_caches()."
        )
    require_num_caches(len(caches), num_blocks)


def _kind(x_BGTD: Tensor) -> str:
    batch, heads, _, width = x_BGTD.shape
    return f"a batch of {batch} with {heads} heads of width {width} in {str(x_BGTD.dtype).removeprefix('torch.')}"
