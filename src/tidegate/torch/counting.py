"""Which queries and keys of an attention call count: padding, unwritten cache, the first real keys.

Legend: B batch, T query positions, S attended positions, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.torch.dispatch import AttentionCall
from tidegate.torch.statistics import AttentionStatistics
from tidegate.torch.statistics_in_parts import statistics_in_parts

__all__ = ["CountedCall", "count_call", "keys_in_words", "require_keys", "require_padding"]

Keys: TypeAlias = int | Sequence[int] | Tensor
"""How many of the first keys; or key positions; or a bool tensor (S,) or (B, S) that is True on the key set."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedCall:
    """The statistics of one call, and what of them counts."""

    statistics: AttentionStatistics
    counted_BHT: Tensor
    """Bool: queries that are no padding and may see something."""
    real_BT: Tensor
    """Bool: queries that are no padding."""
    first: int
    """Position of the first query."""


def count_call(call: AttentionCall, *, keys: Keys, heat: bool, padding: Tensor | None) -> CountedCall:
    """Compute the statistics of a call and settle what counts.

    A number in an additive mask below half the least of its dtype forbids like -inf. Trailing keys that nobody in the
    batch may see, where there are more keys than queries, are a cache's unwritten places and left out.

    Queries are the last of the keys: query i is at position S - T + i, or at i where causality or T > S says so. A key
    that no query of its row may see is padding, and for S = T so is the query at its position. With `padding` given,
    that alone says what is padding, also for S > T.

    padding : (B, at most S) bool, True for real tokens; later keys are real
    """
    call = _without_unwritten(_with_square_causality(_with_plain_mask(call)))
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    real_BS = _seen(call) if padding is None else _given(padding, call)
    aligned = num_queries == num_keys or (padding is not None and num_queries < num_keys)
    real_BT = real_BS[:, num_keys - num_queries :] if aligned else real_BS.new_ones(len(real_BS), num_queries)
    statistics = statistics_in_parts(call, keys=_key_set(keys, real_BS), heat=heat)
    return CountedCall(
        statistics=statistics,
        counted_BHT=real_BT[:, None] & ~statistics.empty,
        real_BT=real_BT,
        first=max(num_keys - num_queries, 0),
    )


def keys_in_words(keys: Keys) -> str:
    """The key set as a reader would say it."""
    if isinstance(keys, Tensor):
        return "a given set of keys"
    if isinstance(keys, int):
        return "the first key" if keys == 1 else f"the first {keys} keys"
    return f"the keys at {', '.join(map(str, keys))}" if len(keys) else "no keys"


def require_keys(keys: Keys) -> None:
    """Refuse what is no number of keys, no positions and no bool tensor."""
    if isinstance(keys, Tensor):
        if keys.dtype != torch.bool or keys.ndim not in (1, 2):
            raise ValueError(
                f"keys as a tensor must be bool, (S,) or (B, S); got {keys.dtype} {tuple(keys.shape)}. "
                "Give positions as a tuple."
            )
    elif isinstance(keys, bool) or not isinstance(keys, int | Sequence) or isinstance(keys, str):
        raise TypeError(
            f"keys must be how many of the first keys, a tuple of positions or a bool tensor; got {keys!r}."
        )
    elif isinstance(keys, int):
        if keys < 1:
            raise ValueError(f"keys must be at least 1 if it says how many of the first keys; got {keys}.")
    elif strays := [position for position in keys if type(position) is not int or position < 0]:
        raise ValueError(f"keys as positions must be whole numbers from 0; got {strays}.")


def require_padding(padding: Tensor | None) -> None:
    """Refuse what is no bool tensor (B, S)."""
    if padding is None:
        return
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.ndim != 2:
        got = f"{padding.dtype} {tuple(padding.shape)}" if isinstance(padding, Tensor) else repr(padding)
        raise ValueError(
            f"padding must be a bool tensor (batch, positions), True for real tokens; got {got}. "
            "An attention mask of ones and zeros becomes one by attention_mask.bool()."
        )


def _with_plain_mask(call: AttentionCall) -> AttentionCall:
    """The mask as bool if it only forbids; else additive, with -inf wherever it forbids."""
    mask = call.mask
    if mask is None or mask.dtype == torch.bool:
        return call
    forbids = mask <= torch.finfo(mask.dtype).min / 2
    if bool((forbids | (mask == 0)).all()):
        return call._replace(mask=~forbids)
    return call._replace(mask=mask.masked_fill(forbids, float("-inf")))


def _with_square_causality(call: AttentionCall) -> AttentionCall:
    """The call with as many keys as queries wherever it is causal: it lines up the first query with the first key."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if not call.causal or num_queries == num_keys:
        return call
    if num_queries < num_keys:
        return _with_first_keys(call, num_queries)
    ordered = torch.ones(num_queries, num_keys, dtype=torch.bool, device=call.query.device).tril()[None, None]
    if call.mask is None:
        return call._replace(mask=ordered, causal=False)
    mask = call.mask & ordered if call.mask.dtype == torch.bool else call.mask.masked_fill(~ordered, float("-inf"))
    return call._replace(mask=mask, causal=False)


def _with_first_keys(call: AttentionCall, num_keys: int) -> AttentionCall:
    mask = call.mask if call.mask is None or call.mask.shape[-1] == 1 else call.mask[..., :num_keys]
    return call._replace(key=call.key[:, :, :num_keys], value=call.value[:, :, :num_keys], mask=mask)


def _without_unwritten(call: AttentionCall) -> AttentionCall:
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None or num_queries >= num_keys:
        return call
    written = _seen(call).any(dim=0).nonzero()
    last = int(written[-1]) + 1 if len(written) else num_keys
    return _with_first_keys(call, max(last, num_queries))


def _seen(call: AttentionCall) -> Tensor:
    """(B, S) bool: keys that a query of their row may see; every key if there is no mask."""
    shape = (call.query.shape[0], call.key.shape[2])
    if call.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=call.query.device)
    allowed = call.mask if call.mask.dtype == torch.bool else call.mask != float("-inf")
    return allowed.flatten(1, 2).any(dim=1).expand(shape)


def _given(padding: Tensor, call: AttentionCall) -> Tensor:
    """The padding that was given, (B, S)."""
    batch, num_keys = call.query.shape[0], call.key.shape[2]
    if padding.shape[0] != batch or padding.shape[1] > num_keys:
        raise ValueError(
            f"padding has {padding.shape[0]} rows of {padding.shape[1]} positions, but attention was called on {batch} "
            f"rows of {num_keys} keys. Give this batch's, or padding=None to read it from the masks."
        )
    return F.pad(padding.to(call.query.device), (0, num_keys - padding.shape[1]), value=True)


def _key_set(keys: Keys, real_BS: Tensor) -> Sequence[int] | Tensor:
    """The key set as `attention_statistics` takes it; keys that this call does not have are left out."""
    num_keys = real_BS.shape[1]
    if isinstance(keys, int):
        return real_BS & (real_BS.cumsum(dim=1) <= keys)
    if isinstance(keys, Tensor):
        return F.pad(keys[..., :num_keys].to(real_BS.device), (0, max(num_keys - keys.shape[-1], 0)), value=False)
    return tuple(position for position in keys if position < num_keys)
