"""The statistics of an intercepted attention call, part by part, and a key set's part of its output.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width,
N keys of a set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tidegate.torch.observing.statistics import (
    BLOCK,
    FORBIDDEN,
    FORBIDDING,
    AttentionCall,
    AttentionStatistics,
    KeySet,
    additive,
    grouped_matmul,
    indicator,
    join_parts,
    statistics_of_call,
)
from tidegate.torch.precision import wide_dtype

_PART = 2**19
"""Elements in the queries of one part; more if one row has more."""


def with_plain_mask(call: AttentionCall) -> AttentionCall:
    """Return the call with its mask as bool if it only hides keys; else additive, with -inf wherever it hides one."""
    mask = call.mask
    if mask is None or mask.dtype == torch.bool or call.scored:
        return call
    hides = mask <= FORBIDDING
    only_hides = bool((hides | (mask == 0)).all())
    return call._replace(mask=~hides if only_hides else mask.masked_fill(hides, -math.inf))


@torch.no_grad()
def key_set_output(call: AttentionCall, log_partition_BHT: Tensor, keys: KeySet) -> Tensor:
    r"""Return the key set's part of each query's output, $\sum_{j \in J} A_{ij} v_j$.

    Only the scores of keys in the set are computed: with a known log-partition, $A_{ij} = \exp(S_{ij} - L_i)$.

    Args:
        call: Causal only for S = T.
        log_partition_BHT: Of all keys, as `attention_statistics` returns it.
        keys: Positions, or a bool tensor (S,) or (B, S).

    Returns:
        (B, H, T, width of the values), in float32 or better; 0 if the query sees no key of the set.
    """
    dtype, (num_queries, num_keys) = wide_dtype(call.query.dtype), (call.query.shape[2], call.key.shape[2])
    in_set = indicator(keys, call.key).to(call.key.device).expand(len(call.key), num_keys)
    num_chosen = int(in_set.sum(dim=-1).max())
    # Rows with fewer keys in their set are filled with others, which are hidden.
    chosen_BN = in_set.int().argsort(dim=-1, descending=True, stable=True)[:, :num_chosen]
    hidden_B11N = ~in_set.gather(1, chosen_BN)[:, None, None]
    chosen_BGND = chosen_BN[:, None, :, None].expand(-1, call.key.shape[1], -1, -1)
    key, value = (x.to(dtype).gather(2, chosen_BGND.expand(-1, -1, -1, x.shape[-1])) for x in (call.key, call.value))
    query = call.query.to(dtype) * call.factor
    parts: list[Tensor] = []
    size = max(BLOCK, BLOCK * num_keys // max(num_chosen, 1))
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, num_queries, size):
            queries = slice(start, start + size)
            scores = torch.zeros((), dtype=dtype) if call.scored else grouped_matmul(query[:, :, queries], key.mT)
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            if call.mask is not None:
                scores = scores + _mask_of_keys(call, queries, chosen_BN, dtype)
            scores = scores.masked_fill(hidden_B11N, -math.inf)
            if call.causal:
                position = torch.arange(num_queries, device=query.device)[queries]
                scores = scores.masked_fill(chosen_BN[:, None, None] > position[:, None], -math.inf)
            # The log-partition of a query that may see nothing is -inf: any finite number gives weights of 0.
            log_partition = log_partition_BHT[:, :, queries].clamp(min=torch.finfo(dtype).min)
            weights = (scores - log_partition.unsqueeze(-1)).exp()
            parts.append(grouped_matmul(weights, value))
    return torch.cat(parts, dim=2)


def _mask_of_keys(call: AttentionCall, queries: slice, chosen_BN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of some queries and each row's chosen keys."""
    assert call.mask is not None
    rows = call.mask if call.mask.shape[2] == 1 else call.mask[:, :, queries]
    if rows.shape[-1] > 1:
        rows = rows.expand(len(chosen_BN), -1, -1, -1)
        rows = rows.gather(3, chosen_BN[:, None, None].expand(*rows.shape[:3], -1))
    bias = additive(rows, dtype)
    return bias.masked_fill(bias <= FORBIDDEN, -math.inf) if call.scored else bias


def statistics_in_parts(call: AttentionCall, *, keys: KeySet, heat: bool) -> AttentionStatistics:
    """Return the statistics of a call, which is causal only for S = T, a few rows at a time to save memory."""
    size = max(1, _PART // call.query[0].numel())
    parts: list[AttentionStatistics] = []
    for start in range(0, len(call.query), size):
        rows = slice(start, start + size)
        mask = call.mask if call.mask is None or len(call.mask) == 1 else call.mask[rows]
        part = call._replace(query=call.query[rows], key=call.key[rows], value=call.value[rows], mask=mask)
        in_set = keys[rows] if isinstance(keys, Tensor) and keys.ndim == 2 else keys
        parts.append(statistics_of_call(part, keys=in_set, heat=heat))
    return join_parts(parts, 0)
