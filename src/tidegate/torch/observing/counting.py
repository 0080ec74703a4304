"""Which queries and keys of an attention call count, and where they stand: padding, caches, the first real keys.

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

from tidegate.torch.observing.call_statistics import key_set_output, statistics_in_parts, with_plain_mask
from tidegate.torch.observing.calls import AttentionCall
from tidegate.torch.observing.spelled_out import FORBIDDEN, FORBIDDING
from tidegate.torch.observing.statistics import AttentionStatistics, with_sink

Keys: TypeAlias = int | Sequence[int] | Tensor
"""How many of the first keys; or key positions; or a bool tensor (S,) or (B, S) that is True on the key set."""


class Past(NamedTuple):
    """What is kept of a layer's sequence to know its next call by."""

    key_BD: Tensor
    """The last key, of one head."""
    real_BP: Tensor
    """Bool: which positions are no padding."""


def past_after(call: AttentionCall, real_BP: Tensor) -> Past:
    """Return what to recognise the next call by; the last key is that of the last position."""
    # A view would keep all keys, and a static cache writes over them.
    return Past(call.key[:, 0, -1].clone(), real_BP)


def positions_before(past: Past | None, call: AttentionCall) -> Tensor | None:
    """(B, P) bool, which positions before the call's queries are no padding; None if it does not follow that past.

    A call follows if the key before those of its queries is the last key of the past. Rows may come in another order
    and number, as in a search with beams. A cache that was cut back does not follow.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedCall:
    """The statistics of one call, and what of them counts."""

    statistics: AttentionStatistics
    counted_BHT: Tensor
    """Bool: queries that are no padding and may see something; curves by position are of these."""
    in_means_BHT: Tensor
    """Bool: of those the queries that may see more than one key; means are of these."""
    set_output_BHTD: Tensor | None
    """What each query takes in from the key set; None unless asked for."""
    real_BT: Tensor
    """Bool: queries that are no padding."""
    first: int
    """Position of the first query."""
    past: Past | None
    """What the next call may go on from."""


class _PlacedCall(NamedTuple):
    """A call whose keys are the last of a sequence's positions."""

    call: AttentionCall
    real_BP: Tensor
    """Bool: positions that are no padding."""
    real_BT: Tensor
    """Bool: queries that are no padding."""
    first: int
    """Position of the first query."""
    past: Past | None


def count_call(
    call: AttentionCall,
    *,
    keys: Keys,
    heat: bool,
    padding: Tensor | None,
    from_mask: Tensor | None = None,
    set_output: bool = False,
    past: Past | None = None,
    crossing: bool = False,
    num_added: int = 0,
    sink_H: Tensor | None = None,
) -> CountedCall:
    """Compute the statistics of a call and find out which of its queries count.

    A number in an additive mask of at most -10,000 forbids like -inf. Trailing keys that nobody in the batch may see,
    where there are more keys than queries, are a cache's unwritten places and left out.

    Queries are the last of the keys. They follow the positions of `past` if the keys do, and keys that are handed over
    no more keep their places; else query i is at position S - T + i, or at i where causality or T > S says so. A key
    that no query of its row may see is padding, unless `past` knows better; so is the query at its position, for S = T
    and after `past`. With `padding` given, that alone says what is padding; so does `from_mask` if it is of all
    positions.

    A query that may see a single key, in self-attention itself, has all its weight there, whatever the model does: it
    is left out of means and kept in curves by position. Such are the first query of a causal row, of its part after
    padding on the left, and of each packed document that a mask sets apart, and every query of a window of one key.

    set_output : whether to give what each query takes in from the key set
    padding    : (B, at most P) bool, True for real tokens; later ones are real
    from_mask  : the same, of which it is not certain that it is of this sequence
    crossing   : whether queries and keys are of different sequences: queries count from 0 and are no padding
    num_added  : keys behind those of the sequence, which belong to the layer and are always real
    sink_H     : logits of the sinks in the layer's softmax, which the call itself does not have
    """
    whole = call.key.shape[2]
    call = _without_unwritten(_with_square_causality(_with_mask_as_causality(with_plain_mask(call))))
    placed = (
        _place_across(call)
        if crossing
        else _place_within(call, padding, from_mask, past, num_added if call.key.shape[2] == whole else 0)
    )
    _require_rows(keys, len(placed.real_BP))
    in_set = _key_set(keys, placed.real_BP, placed.call.key.shape[2])
    statistics = statistics_in_parts(placed.call, keys=in_set, heat=heat)
    if sink_H is not None:
        statistics = with_sink(statistics, sink_H)
    real_B1T = placed.real_BT[:, None]
    return CountedCall(
        statistics=statistics,
        counted_BHT=real_B1T & ~statistics.empty,
        in_means_BHT=real_B1T & (statistics.num_keys > 1),
        set_output_BHTD=key_set_output(placed.call, statistics.log_partition, in_set) if set_output else None,
        real_BT=placed.real_BT,
        first=placed.first,
        past=placed.past,
    )


def keys_in_words(keys: Keys) -> str:
    """Say in words which keys are in the key set."""
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
    elif len(set(keys)) < len(keys):
        raise ValueError(f"keys as positions must name each key once; got {keys!r}.")


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


def _place_across(call: AttentionCall) -> _PlacedCall:
    real_BT = torch.ones(len(call.query), call.query.shape[2], dtype=torch.bool, device=call.query.device)
    return _PlacedCall(call, real_BP=_visible_keys(call), real_BT=real_BT, first=0, past=None)


def _place_within(
    call: AttentionCall, padding: Tensor | None, from_mask: Tensor | None, past: Past | None, num_added: int
) -> _PlacedCall:
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    gone_BP = None if num_added else positions_before(past, call)
    num_positions = num_keys - num_added if gone_BP is None else gone_BP.shape[1] + num_queries
    if padding is None and from_mask is not None and from_mask.shape == (len(call.query), num_positions):
        padding = from_mask
    if gone_BP is not None:
        return _place_after(call, gone_BP, padding)
    if num_queries < num_keys - num_added:
        return _place_after_unseen(call, padding)
    real_BP = _visible_keys(call) if padding is None else _padding_of_keys(padding, call, num_added)
    if num_queries > num_keys - num_added:
        # More queries than keys are of another sequence.
        return _place_across(call)._replace(real_BP=real_BP)
    after = None if num_added else past_after(call, real_BP)
    return _PlacedCall(call, real_BP=real_BP, real_BT=real_BP[:, :num_queries], first=0, past=after)


def _place_after(call: AttentionCall, gone_BP: Tensor, padding: Tensor | None) -> _PlacedCall:
    """Place a call after positions that are known, which tell padding better than a mask that may have a window."""
    first, num_queries = gone_BP.shape[1], call.query.shape[2]
    # The unwritten places of a static cache that rolls over stand in front.
    call = _with_last_keys(call, first + num_queries)
    real_BP = torch.cat((gone_BP, _visible_keys(call)[:, call.key.shape[2] - num_queries :]), dim=1)
    if padding is not None:
        real_BP = _padding_of_positions(padding, call, first + num_queries)
    return _PlacedCall(call, real_BP=real_BP, real_BT=real_BP[:, first:], first=first, past=past_after(call, real_BP))


def _place_after_unseen(call: AttentionCall, padding: Tensor | None) -> _PlacedCall:
    """Place a call after positions that were not seen: as many as there are keys, or as padding says."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if padding is None:
        real_BP = _visible_keys(call)
        # The queries may be of another sequence, of whose padding nothing is known.
        real_BT = real_BP.new_ones(len(real_BP), num_queries)
    else:
        real_BP = _padding_of_positions(padding, call, max(num_keys, padding.shape[1]))
        real_BT = real_BP[:, -num_queries:]
    first = real_BP.shape[1] - num_queries
    return _PlacedCall(call, real_BP=real_BP, real_BT=real_BT, first=first, past=past_after(call, real_BP))


def _with_mask_as_causality(call: AttentionCall) -> AttentionCall:
    """The call without its mask if that is causality and no more, which the fused kernel can do without a mask."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    mask = call.mask
    if mask is None or mask.dtype != torch.bool or mask.shape[1:] != (1, num_queries, num_keys) or call.causal:
        return call
    if num_queries != num_keys or num_queries == 1 or not bool(mask[:, :, -1].all()):
        return call
    ordered = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).tril()
    return call._replace(mask=None, causal=True) if torch.equal(mask, ordered.expand_as(mask)) else call


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


def _with_last_keys(call: AttentionCall, num_keys: int) -> AttentionCall:
    mask = call.mask if call.mask is None or call.mask.shape[-1] == 1 else call.mask[..., -num_keys:]
    return call._replace(key=call.key[:, :, -num_keys:], value=call.value[:, :, -num_keys:], mask=mask)


def _without_unwritten(call: AttentionCall) -> AttentionCall:
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None or num_queries >= num_keys:
        return call
    written = _visible_keys(call).any(dim=0).nonzero()
    last = int(written[-1]) + 1 if len(written) else num_keys
    return _with_first_keys(call, max(last, num_queries))


def _visible_keys(call: AttentionCall) -> Tensor:
    """(B, S) bool: keys that a query of their row may see; every key if there is no mask."""
    shape = (call.query.shape[0], call.key.shape[2])
    if call.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=call.query.device)
    if call.mask.dtype == torch.bool:
        return call.mask.any(dim=(1, 2)).expand(shape)
    return (call.mask.amax(dim=(1, 2)) > (FORBIDDEN if call.scored else FORBIDDING)).expand(shape)


def _padding_of_keys(padding: Tensor, call: AttentionCall, num_added: int) -> Tensor:
    """The padding that was given, (B, S), for a call that begins a sequence; it has to be of all its positions."""
    batch, num_keys = call.query.shape[0], call.key.shape[2] - num_added
    if padding.shape != (batch, num_keys):
        raise ValueError(
            f"padding has {padding.shape[0]} rows of {padding.shape[1]} positions, but attention was called on {batch} "
            f"rows of {num_keys} keys. Give this batch's, or padding=None to read it from the masks."
        )
    return _padding_of_positions(padding, call, call.key.shape[2])


def _padding_of_positions(padding: Tensor, call: AttentionCall, num_positions: int) -> Tensor:
    """The padding that was given for so many positions, (B, P)."""
    if padding.shape[0] != len(call.query):
        raise ValueError(
            f"padding has {padding.shape[0]} rows, but attention was called on {len(call.query)} rows of "
            f"{call.key.shape[2]} keys. Give this batch's, or padding=None to read it from the masks."
        )
    known = padding[:, :num_positions].to(call.query.device)
    return F.pad(known, (0, num_positions - known.shape[1]), value=True)


def _require_rows(keys: Keys, batch: int) -> None:
    """Refuse a tensor of keys of another batch."""
    if isinstance(keys, Tensor) and keys.ndim == 2 and len(keys) != batch:
        raise ValueError(
            f"keys as a tensor has {len(keys)} rows, but attention was called on {batch}. Give one of shape (S,) for "
            "all rows, or observe each batch with keys of its own."
        )


def _key_set(keys: Keys, real_BP: Tensor, num_keys: int) -> Sequence[int] | Tensor:
    """The key set as `attention_statistics` takes it, of the last positions; those that are no keys are left out."""
    num_positions = real_BP.shape[1]
    dropped = num_positions - num_keys
    if isinstance(keys, int):
        return (real_BP & (real_BP.cumsum(dim=1) <= keys))[:, dropped:]
    if isinstance(keys, Tensor):
        known = keys[..., :num_positions].to(real_BP.device)
        return F.pad(known, (0, num_positions - known.shape[-1]), value=False)[..., dropped:]
    return tuple(position - dropped for position in keys if dropped <= position < num_positions)
