"""The statistics of an attention call a few heads at a time: less memory, and nearer to the processor's caches.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from tidegate.torch.observing.dispatch import AttentionCall
from tidegate.torch.observing.statistics import AttentionStatistics, attention_statistics

_PART = 2**19
"""Numbers in the queries of one part, if that is not less than one group of heads of one row."""


def statistics_in_parts(call: AttentionCall, *, keys: Sequence[int] | Tensor, heat: bool) -> AttentionStatistics:
    """What `attention_statistics` gives for the whole call, (B, H, T) each.

    call : causal only for S = T
    keys : positions, or a bool tensor (S,) or (B, S)
    """
    num_rows, num_groups = call.query.shape[0], call.key.shape[1]
    group_size = call.query[0].numel() // num_groups
    # The kernel gives each thread as many queries; of a single causal head, the later half is most of the work.
    groups = min(num_groups, max(torch.get_num_threads(), _PART // group_size))
    rows = max(1, _PART // (group_size * num_groups))
    by_rows = [
        _joined([_statistics(_of_groups(part, at, at + groups), keys, heat) for at in range(0, num_groups, groups)], 1)
        for part, keys in _by_rows(call, keys, rows, num_rows)
    ]
    return _joined(by_rows, 0)


def _by_rows(
    call: AttentionCall, keys: Sequence[int] | Tensor, rows: int, num_rows: int
) -> Iterator[tuple[AttentionCall, Sequence[int] | Tensor]]:
    for start in range(0, num_rows, rows):
        part = slice(start, start + rows)
        mask = call.mask if call.mask is None or call.mask.shape[0] == 1 else call.mask[part]
        in_set = keys[part] if isinstance(keys, Tensor) and keys.ndim == 2 else keys
        yield call._replace(query=call.query[part], key=call.key[part], value=call.value[part], mask=mask), in_set


def _of_groups(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """The key/value heads from `start` to `stop` with the query heads that they serve."""
    size = call.query.shape[1] // call.key.shape[1]
    heads = slice(start * size, stop * size)
    return call._replace(
        query=call.query[:, heads],
        key=call.key[:, start:stop],
        value=call.value[:, start:stop],
        mask=call.mask if call.mask is None or call.mask.shape[1] == 1 else call.mask[:, heads],
    )


def _statistics(call: AttentionCall, keys: Sequence[int] | Tensor, heat: bool) -> AttentionStatistics:
    return attention_statistics(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        causal=call.causal,
        scale=call.scale,
        keys=keys,
        heat=heat,
    )


def _joined(parts: list[AttentionStatistics], dim: int) -> AttentionStatistics:
    if len(parts) == 1:
        return parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(AttentionStatistics)}
    given = {name: column for name, column in columns.items() if column[0] is not None}
    return AttentionStatistics(**{name: torch.cat(column, dim=dim) for name, column in given.items()})
