"""Determine which queries and keys of an attention call count, and their positions: padding, caches, key sets.

Legend: B batch, T query positions, S attended positions, P positions of the sequence so far, H query heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate._validation import InputError
from tidegate.torch.observing.call_statistics import key_set_output, statistics_in_parts, with_plain_mask
from tidegate.torch.observing.statistics import FORBIDDEN, FORBIDDING, AttentionCall, AttentionStatistics, with_sink

_LEAST_SCORE = -6e4
"""Lower scores are always masked: no model has such scores, and half-precision masks add -65,504."""

Keys: TypeAlias = int | Sequence[int] | Tensor
"""How many of the first keys; or key positions; or a bool tensor (S,) or (B, S) that is True on the key set."""


class Past(NamedTuple):
    """The state of a layer's sequence, which identifies its next call."""

    key_BD: Tensor
    """The last key, of one head."""
    real_BP: Tensor
    """Bool: positions that are not padding."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedCall:
    """The statistics of one call, and which of them count."""

    statistics: AttentionStatistics
    counted_BHT: Tensor
    """Bool: real queries that may see something, which enter curves by position."""
    in_means_BHT: Tensor
    """Bool: those that may see more than one key, which enter means."""
    set_output_BHTD: Tensor | None
    """The key set's part of each query's output; None unless requested."""
    real_BT: Tensor
    """Bool: queries that are not padding."""
    first: int
    """Position of the first query."""
    past: Past | None
    """The state after this call."""
    has_low_queries: bool
    """Whether real queries are left out because all their scores are below -5,000, although they may not be masked."""


class _PlacedCall(NamedTuple):
    """A call whose keys are the last of a sequence's positions."""

    call: AttentionCall
    real_BP: Tensor
    """Bool: positions that are not padding."""
    real_BT: Tensor
    """Bool: queries that are not padding."""
    first: int
    """Position of the first query."""
    past: Past | None = None


def count_call(
    call: AttentionCall,
    *,
    keys: Keys,
    heat: bool,
    padding: Tensor | None,
    from_mask: Tensor | None,
    passed_on: bool,
    set_output: bool,
    past: Past | None,
    cross_attention: bool,
    num_added: int,
    sink_H: Tensor | None,
) -> CountedCall:
    """Compute the statistics of a call and determine which of its queries count.

    Masks and single keys are treated as `observe` documents. If there are more keys than queries, trailing keys that no
    query of the batch may see are unwritten slots of a cache, and are left out.

    The queries belong to the last keys. If the keys continue `past`, so do the positions, and keys that a cache has
    dropped keep theirs. Otherwise query i is at position S - T + i, or at i under causality or if T > S. A key that no
    query of its row may see is padding, unless `past` has it as real; so is the query at its position, for S = T and
    after `past`. `padding` overrides this, as does `from_mask` if it covers all positions.

    Args:
        call: The call.
        keys: The key set.
        heat: Whether to compute the largest score and the heat capacity.
        padding: (B, at most P) bool, True for real tokens; later ones are real.
        from_mask: The same, if it may belong to another sequence.
        passed_on: Whether `from_mask` reaches the call; if not, it counts only if the call hides its padding.
        set_output: Whether to compute the key set's part of each query's output.
        past: The state after the previous call.
        cross_attention: Whether queries and keys belong to different sequences: queries count from 0 and are all real.
        num_added: Number of keys that the layer appends to those of the sequence; they are always real.
        sink_H: Sink logits of the layer's softmax that the call itself does not have.
    """
    whole = call.key.shape[2]
    call = _without_unwritten(_with_square_causality(_with_mask_as_causality(with_plain_mask(call))))
    if cross_attention:
        placed = _place_first(call, _visible_keys(call))
    else:
        num_added = num_added if call.key.shape[2] == whole else 0
        if from_mask is not None and not passed_on and not _hides_padding(call, from_mask, num_added):
            from_mask = None
        placed = _place_within(call, padding, from_mask, past, num_added)
    in_set = _key_set(keys, placed.real_BP, placed.call.key.shape[2])
    statistics = statistics_in_parts(placed.call, keys=in_set, heat=heat)
    if sink_H is not None:
        statistics = with_sink(statistics, sink_H)
    real_B1T = placed.real_BT[:, None]
    # A row without any real key is unlikely to be all padding.
    low_BHT = statistics.empty & (real_B1T | ~placed.real_BP.any(dim=1)[:, None, None])
    has_low_queries = False
    if placed.call.scored and bool(low_BHT.any()):
        assert placed.call.mask is not None
        has_low_queries = bool((low_BHT & (placed.call.mask.amax(dim=-1) > _LEAST_SCORE)).any())
    return CountedCall(
        statistics=statistics,
        counted_BHT=real_B1T & ~statistics.empty,
        in_means_BHT=real_B1T & (statistics.num_keys > 1),
        set_output_BHTD=key_set_output(placed.call, statistics.log_partition, in_set) if set_output else None,
        real_BT=placed.real_BT,
        first=placed.first,
        past=placed.past,
        has_low_queries=has_low_queries,
    )


def describe_keys(keys: Keys) -> str:
    """Return the key set in words."""
    if isinstance(keys, Tensor):
        return "a given set of keys"
    if isinstance(keys, int):
        return "the first key" if keys == 1 else f"the first {keys} keys"
    return f"the keys at {', '.join(map(str, keys))}" if len(keys) else "no keys"


def validate_keys(keys: Keys) -> None:
    """Raise InputError unless this is a key set, or TypeError if it is of another type."""
    expected = "a positive number of first keys, a tuple of distinct positions, or a bool tensor (S,) or (B, S)"
    if isinstance(keys, Tensor):
        if keys.dtype != torch.bool or keys.ndim not in (1, 2):
            got = (keys.dtype, tuple(keys.shape))
            raise InputError("keys", expected=expected, got=got, hint="Pass positions as a tuple.")
    elif isinstance(keys, bool) or not isinstance(keys, int | Sequence) or isinstance(keys, str):
        raise TypeError(f"keys must be {expected}, got {keys!r}.")
    elif isinstance(keys, int):
        if keys < 1:
            raise InputError("keys", expected=expected, got=keys)
    elif any(type(position) is not int or position < 0 for position in keys) or len(set(keys)) < len(keys):
        raise InputError("keys", expected=expected, got=keys)


def validate_padding(padding: Tensor | None) -> None:
    """Raise InputError unless this is a bool tensor (B, S) or None."""
    if padding is None:
        return
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.ndim != 2:
        raise InputError(
            "padding",
            expected="a bool tensor (batch, positions), True for real tokens, or None",
            got=(padding.dtype, tuple(padding.shape)) if isinstance(padding, Tensor) else padding,
            hint="Convert an attention mask of ones and zeros by attention_mask.bool().",
        )


def _place_first(call: AttentionCall, real_BP: Tensor) -> _PlacedCall:
    """Place queries at positions from 0 of a sequence that is not that of the keys; all are real."""
    return _PlacedCall(call, real_BP, real_BP.new_ones(len(call.query), call.query.shape[2]), first=0)


def _place_within(
    call: AttentionCall, padding: Tensor | None, from_mask: Tensor | None, past: Past | None, num_added: int
) -> _PlacedCall:
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    before_BP = None if num_added else _positions_before(past, call)
    num_positions = num_keys - num_added if before_BP is None else before_BP.shape[1] + num_queries
    if padding is None and from_mask is not None and from_mask.shape == (len(call.query), num_positions):
        padding = from_mask
    if before_BP is not None:
        # The unwritten slots of a static cache that rolls over come first.
        call = _with_keys(call, slice(-num_positions, None))
        if padding is not None:
            return _place_last(call, _extend_padding(padding, call, num_positions))
        # Known positions are more reliable than a mask that may have a window.
        return _place_last(call, torch.cat((before_BP, _visible_keys(call)[:, -num_queries:]), dim=1))
    if num_queries < num_keys - num_added:
        # Earlier positions were not observed: take as many as there are keys, or the length of the padding.
        if padding is not None:
            return _place_last(call, _extend_padding(padding, call, max(num_keys, padding.shape[1])))
        real_BP = _visible_keys(call)
        # The queries may belong to another sequence, whose padding is unknown.
        return _place_last(call, real_BP)._replace(real_BT=real_BP.new_ones(len(real_BP), num_queries))
    if padding is None:
        real_BP = _visible_keys(call)
    else:
        if padding.shape[1] != num_keys - num_added:
            raise _padding_error(padding, len(call.query), num_keys - num_added)
        real_BP = _extend_padding(padding, call, num_keys)
    if num_queries > num_keys - num_added:
        # More queries than keys belong to another sequence.
        return _place_first(call, real_BP)
    past = None if num_added else _past_after(call, real_BP)
    return _PlacedCall(call, real_BP, real_BP[:, :num_queries], first=0, past=past)


def _place_last(call: AttentionCall, real_BP: Tensor) -> _PlacedCall:
    """Place queries at the last positions."""
    first = real_BP.shape[1] - call.query.shape[2]
    return _PlacedCall(call, real_BP, real_BP[:, first:], first, _past_after(call, real_BP))


def _past_after(call: AttentionCall, real_BP: Tensor) -> Past:
    # A view would keep all keys alive and change when a static cache is overwritten.
    return Past(call.key[:, 0, -1].clone(), real_BP)


def _positions_before(past: Past | None, call: AttentionCall) -> Tensor | None:
    """Return which earlier positions are real, (B, P) bool; None if the call does not continue `past`.

    It does if the key before those of its queries is the last key of `past`. Rows may have another order and number,
    as in beam search. After a cache is cropped, the call does not continue it.
    """
    num_before = call.key.shape[2] - call.query.shape[2]
    if past is None or num_before < 1:
        return None
    before_BD = call.key[:, 0, num_before - 1]
    last_BD = past.key_BD
    if before_BD.shape[1:] != last_BD.shape[1:] or before_BD.device != last_BD.device:
        return None
    if torch.equal(before_BD, last_BD):
        return past.real_BP
    same = torch.stack([(row == last_BD).all(dim=-1) for row in before_BD])
    return past.real_BP[same.int().argmax(dim=1)] if bool(same.any(dim=1).all()) else None


def _with_mask_as_causality(call: AttentionCall) -> AttentionCall:
    """Return a call with a causal mask as one that is causal: the fused kernel is faster without a mask."""
    num_queries, mask = call.query.shape[2], call.mask
    if mask is None or mask.dtype != torch.bool or call.causal or num_queries == 1:
        return call
    if mask.shape[1:] != (1, num_queries, call.key.shape[2]) or not bool(mask[:, :, -1].all()):
        return call
    ordered = torch.ones_like(mask[0]).tril().expand_as(mask)
    return call._replace(mask=None, causal=True) if torch.equal(mask, ordered) else call


def _with_square_causality(call: AttentionCall) -> AttentionCall:
    """Return the call with as many keys as queries if it is causal, which aligns the first query with the first key."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if not call.causal or num_queries == num_keys:
        return call
    if num_queries < num_keys:
        return _with_keys(call, slice(num_queries))
    mask = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=call.query.device).tril()
    if call.mask is not None:
        mask = call.mask & mask if call.mask.dtype == torch.bool else call.mask.masked_fill(~mask, float("-inf"))
    return call._replace(mask=mask, causal=False)


def _with_keys(call: AttentionCall, keys: slice) -> AttentionCall:
    mask = call.mask if call.mask is None or call.mask.shape[-1] == 1 else call.mask[..., keys]
    return call._replace(key=call.key[:, :, keys], value=call.value[:, :, keys], mask=mask)


def _without_unwritten(call: AttentionCall) -> AttentionCall:
    """Return the call without the last keys of its cache if no query may see them."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None or num_queries >= num_keys:
        return call
    written = _visible_keys(call).any(dim=0).nonzero()
    last = int(written[-1]) + 1 if len(written) else num_keys
    return _with_keys(call, slice(max(last, num_queries)))


def _visible_keys(call: AttentionCall) -> Tensor:
    """Return the keys that a query of their row may see, (B, S) bool; every key if there is no mask."""
    shape = (call.query.shape[0], call.key.shape[2])
    if call.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=call.query.device)
    if call.mask.dtype == torch.bool:
        return call.mask.any(dim=(1, 2)).expand(shape)
    return (call.mask.amax(dim=(1, 2)) > (FORBIDDEN if call.scored else FORBIDDING)).expand(shape)


def _hides_padding(call: AttentionCall, real_BP: Tensor, num_added: int) -> bool:
    """Return whether there is padding among the call's keys that no real query may see."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if len(real_BP) != len(call.query) or real_BP.shape[1] < max(num_queries, num_keys - num_added):
        return False
    real_BP = real_BP.to(call.query.device)
    padded_BS = F.pad(~real_BP[:, real_BP.shape[1] - num_keys + num_added :], (0, num_added), value=False)
    limit, order = FORBIDDEN if call.scored else FORBIDDING, torch.arange(num_keys, device=call.query.device)
    for row in padded_BS.any(dim=1).nonzero().flatten().tolist():
        real, padded = real_BP[row, -num_queries:], padded_BS[row]
        # One head at a time, so that few scores are copied.
        for mask in (None,) if call.mask is None else call.mask[row % len(call.mask)]:
            seen = torch.ones((), dtype=torch.bool, device=call.query.device)
            if call.causal:
                seen = order[padded] <= order[:num_queries][real][:, None]
            if mask is not None:
                part = mask.expand(num_queries, num_keys)[real][:, padded]
                seen = seen & (part if part.dtype == torch.bool else part > limit)
            if bool(seen.any()):
                return False
    return bool(padded_BS.any())


def _extend_padding(padding: Tensor, call: AttentionCall, num_positions: int) -> Tensor:
    """Return the given padding for `num_positions` positions, (B, P); those beyond its end are real."""
    if padding.shape[0] != len(call.query):
        raise _padding_error(padding, len(call.query), call.key.shape[2])
    known = padding[:, :num_positions].to(call.query.device)
    return F.pad(known, (0, num_positions - known.shape[1]), value=True)


def _padding_error(padding: Tensor, batch: int, num_keys: int) -> InputError:
    expected = f"({batch}, {num_keys}), the rows and keys of the attention call"
    hint = "Pass the padding of this batch, or None to infer it from the masks."
    return InputError("padding", expected=expected, got=tuple(padding.shape), hint=hint)


def _key_set(keys: Keys, real_BP: Tensor, num_keys: int) -> Sequence[int] | Tensor:
    """Return the key set for `attention_statistics`, as it falls on the last positions."""
    batch, num_positions = real_BP.shape
    dropped = num_positions - num_keys
    if isinstance(keys, int):
        return (real_BP & (real_BP.cumsum(dim=1) <= keys))[:, dropped:]
    if isinstance(keys, Tensor):
        if keys.ndim == 2 and len(keys) != batch:
            expected = f"a bool tensor of the {batch} rows of the attention call"
            hint = "Pass one of shape (S,) for all rows, or observe each batch with its own keys."
            raise InputError("keys", expected=expected, got=tuple(keys.shape), hint=hint)
        known = keys[..., :num_positions].to(real_BP.device)
        return F.pad(known, (0, num_positions - known.shape[-1]), value=False)[..., dropped:]
    return tuple(position - dropped for position in keys if dropped <= position < num_positions)
