r"""Statistics of an attention call for each query, without the attention matrix.

With scores $S_{ij} = c\; q_i \cdot k_j + b_{ij}$ and weights $A_{ij} = \exp(S_{ij} - L_i)$, every statistic is a sum
over keys of the weights times a number per key: one more channel of the values. So one call of the fused kernel
computes them all. The kernel returns $L_i$; its values are the keys, for the mean score
$U_i = c\; q_i \cdot \sum_j A_{ij} k_j$, and further channels with the norms of the true values and the indicator of the
key set.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width,
C further channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate._validation import InputError, require_bool, require_positive
from tidegate.tensors.sink import entropy_with_sink, log_partition_with_sink, sink_mass
from tidegate.torch.masks import require_mask
from tidegate.torch.precision import wide_dtype

KeySet: TypeAlias = Sequence[int] | Tensor
"""Key positions, or a bool tensor (S,) or (B, S) that is True on them."""

FORBIDDING = -1e4
"""Values of an additive mask up to this hide a key: the smallest number of a dtype, -1e9, -10,000."""
FORBIDDEN = FORBIDDING / 2
"""Where only the sum of score and mask is known, sums up to this hide a key."""

BLOCK = 64
"""Queries per block where scores or masks are stored: memory grows with T + S, not with T S."""

_WEIGHTLESS = 1e4
"""A score this far below the largest has no weight, even in float64."""

_ALIGNMENT = 8
"""The fused kernel is faster on head widths that are multiples of this."""

_fused_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class AttentionCall(NamedTuple):
    """Arguments and result of one call: queries (B, H, T, D), keys and values (B, G, S, D), as passed to the kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Bool (True = attend) or added to the scores; four axes."""
    causal: bool
    """Whether query i may see only keys up to i, for any T and S."""
    scale: float | None
    """None is 1/sqrt(D)."""
    output: Tensor | None = None
    """(B, H, T, D): the kernel's result."""
    softcap: float | None = None
    """c: before the mask, a score s becomes c tanh(s / c)."""
    sink_H: Tensor | None = None
    """Sink logits in the softmax of the call itself, not those of a layer around it."""
    scored: bool = False
    """Whether the mask, (B, H, T, S), is the final scores, where up to -5,000 hides a key; queries are not used."""

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionStatistics:
    """One number for each query, (B, H, T), in float32 or better."""

    log_partition: Tensor
    r"""$L = \log \sum_j \exp S_j$; -inf if the query may see nothing."""
    mean_score: Tensor
    r"""$U = \sum_j A_j S_j$; 0 if the query may see nothing."""
    entropy: Tensor
    r"""$L - U = -\sum_j A_j \log A_j$ in nats; 0 if the query may see nothing."""
    effective_keys: Tensor
    """Exponential of the entropy: n for equal weights on n keys; 0 if the query may see nothing."""
    mass: Tensor
    r"""$\sum_{j \in J} A_j$, the weight on the key set J; a key that the query may not see has none."""
    impact: Tensor
    r"""$\sum_{j \in J} A_j |v_j| / \sum_j A_j |v_j|$; 0 if all values that the query attends to are 0."""
    num_keys: Tensor
    """Integer: how many keys the query may see."""
    heat_capacity: Tensor | None = None
    r"""$\sum_j A_j (S_j - U)^2$; 0 if the query may see nothing. None unless requested."""
    max_score: Tensor | None = None
    """Largest score among the keys that the query may see; -inf if there are none. None unless requested."""
    sink: Tensor | None = None
    r"""Weight on the sink of the softmax, $e^s / (Z + e^s)$. None if the layer has none."""

    @property
    def empty(self) -> Tensor:
        """Bool: whether the query may see nothing."""
        return self.num_keys == 0


def attention_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    keys: KeySet = (0,),
    heat: bool = False,
) -> AttentionStatistics:
    """Return log-partition, mean score, entropy, and a key set's mass and impact, for every query of an attention call.

    No tensor of T S elements is created: the fused CPU kernel computes them, or (on another device, with `heat`, a soft
    cap or a mask with finite nonzero entries) scores are computed for one block of queries at a time. Half precision is
    computed in float32. The results carry no gradients.

    Args:
        q: (B, H, T, D), as used in the scores: rotated, normalized.
        k: (B, G, S, D), G divides H.
        v: (B, G, S, any width), as aggregated: after value gates.
        mask: bool (True = attend) or added to the scores, broadcasts to (B, H, T, S). Only -inf hides a key: a large
            negative number is a score like any other.
        causal: Whether query i sees key j only if j <= i + S - T; requires S >= T. A mask may hide more.
        scale: Factor of the scores; None is 1/sqrt(D).
        softcap: c > 0: before the mask, a scaled score s becomes c tanh(s / c); None applies no cap.
        keys: The key set, as positions or as a bool tensor (S,) or (B, S); by default the first key.
        heat: Whether to return the heat capacity and the largest score as well.

    Returns:
        Statistics of shape (B, H, T) each.

    Raises:
        InputError: Shapes or options do not fit; TypeError if dtypes do not.
    """
    _validate_tensors(q, k, v)
    require_bool("causal", causal)
    require_bool("heat", heat)
    if mask is not None:
        require_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if causal and q.shape[2] > k.shape[2]:
        expected = "False where there are more queries than keys"
        raise InputError("causal", expected=expected, got=causal, hint="Use a mask.")
    if scale is not None and not math.isfinite(scale):
        raise InputError("scale", expected="a finite number or None", got=scale)
    if softcap is not None:
        require_positive("softcap", softcap)
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    return statistics_of_call(AttentionCall(q, k, v, mask, causal, scale, softcap=softcap), keys=keys, heat=heat)


@torch.no_grad()
def statistics_of_call(call: AttentionCall, *, keys: KeySet, heat: bool) -> AttentionStatistics:
    """Return the statistics of a valid call; causality is that of `attention_statistics`."""
    dtype = wide_dtype(call.mask.dtype if call.scored and call.mask is not None else call.query.dtype)
    # Under autocast the products would be in half precision.
    with torch.autocast(call.query.device.type, enabled=False):
        norm_BGS = torch.linalg.vector_norm(call.value.to(dtype), dim=-1)
        in_set_BGS = indicator(keys, call.key).to(norm_BGS).unsqueeze(-2).expand_as(norm_BGS)
        call = call._replace(
            query=call.query.to(dtype),
            key=call.key.to(dtype),
            value=torch.stack((norm_BGS, in_set_BGS, in_set_BGS * norm_BGS), dim=-1),
            causal=call.causal and call.query.shape[2] > 1,
        )
        parts = _fused_parts(call) if _fits_fused_kernel(call, heat) else _plain_parts(call, heat)
        return join_parts(list(parts), -1)


def with_sink(statistics: AttentionStatistics, sink_H: Tensor) -> AttentionStatistics:
    """Return the statistics under a softmax with one more state per head: a sink with these logits.

    Impact and the largest score still refer to the keys only. A query that may see no key has all its weight on the
    sink, and keeps its documented values.
    """
    empty, mean_score, heat = statistics.empty, statistics.mean_score, statistics.heat_capacity
    sink_H = sink_H.detach().to(mean_score)
    sink_BHT, sink = sink_H[:, None], sink_mass(statistics.log_partition, sink_H)
    kept = 1 - sink
    entropy = entropy_with_sink(statistics.entropy, sink)
    if heat is not None:
        heat = (kept * heat + sink * kept * (mean_score - sink_BHT).square()).masked_fill(empty, 0)
    return replace(
        statistics,
        log_partition=log_partition_with_sink(statistics.log_partition, sink_H),
        mean_score=(kept * mean_score + sink * sink_BHT).masked_fill(empty, 0),
        entropy=entropy,
        effective_keys=entropy.exp().masked_fill(empty, 0),
        mass=kept * statistics.mass,
        heat_capacity=heat,
        sink=sink,
    )


class _Block(NamedTuple):
    """Consecutive queries, the keys up to the last that any of them may see, and the bias of their scores.

    On the CPU, the keys start with the first that any of them may see: under a window there are few.
    """

    queries: slice
    keys: slice
    bias: Tensor | None
    num_keys_BHT: Tensor
    """How many keys each query may see."""


def _blocks(call: AttentionCall, size: int) -> Iterator[_Block]:
    """Yield the call in blocks of `size` queries; a single empty block if there are no queries."""
    B, H, T, _ = call.query.shape
    S = call.key.shape[2]
    for start in range(0, max(T, 1), size):
        stop = min(start + size, T)
        num_visible = S - T + stop if call.causal else S
        bias = _bias(call, start, stop, num_visible)
        keys = slice(num_visible)
        if bias is None:
            num_keys = torch.full((1,), num_visible, device=call.query.device)
        else:
            # A mask of one column applies to every key.
            seen = bias != -math.inf
            num_keys = seen.sum(dim=-1) * (num_visible // bias.shape[-1])
            # On other devices, reading the mask would wait for the device.
            if bias.shape[-1] > 1 and bias.numel() and bias.device.type == "cpu":
                positions = (bias.flatten(0, -2).amax(dim=0) != -math.inf).nonzero()
                keys = slice(int(positions[0]), int(positions[-1]) + 1) if len(positions) else slice(1)
                bias = bias[..., keys]
        yield _Block(slice(start, stop), keys, bias, num_keys.expand(B, H, stop - start))


def _bias(call: AttentionCall, start: int, stop: int, num_visible: int) -> Tensor | None:
    """Return mask and causality of the queries from `start` to `stop` as one additive mask, or None."""
    bias = None
    if call.mask is not None:
        rows = call.mask if call.mask.shape[2] == 1 else call.mask[:, :, start:stop]
        bias = additive(rows[..., :num_visible], call.query.dtype)
        if call.scored:
            bias = F.threshold(bias, FORBIDDEN, -math.inf)
    if call.causal:
        key = torch.arange(num_visible, device=call.query.device)
        last = key[num_visible - (stop - start) :, None]
        bias = (call.query.new_zeros(1, 1, 1, 1) if bias is None else bias).masked_fill(key > last, -math.inf)
    return bias


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as a bias of the scores."""
    if mask.dtype == torch.bool:
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
    return mask.to(dtype)


def _fits_fused_kernel(call: AttentionCall, heat: bool) -> bool:
    """Return whether the fused kernel suffices: it gives neither second moments of scores nor the mean of a bias."""
    # A call without queries crashes the process in the kernel.
    if heat or call.scored or call.softcap is not None or call.query.device.type != "cpu" or call.query.numel() == 0:
        return False
    if call.mask is None or call.mask.dtype == torch.bool:
        return True
    blocks = (additive(rows, call.query.dtype) for rows in call.mask.split(BLOCK, dim=2))
    return all(bool(((bias == 0) | (bias == -math.inf)).all()) for bias in blocks)


def _fused_parts(call: AttentionCall) -> Iterator[AttentionStatistics]:
    """Yield statistics from the fused kernel, which takes queries, keys and values of one width, padded with zeros."""
    width, num_channels = call.query.shape[-1], call.value.shape[-1]
    spare = -(width + num_channels) % _ALIGNMENT
    query, key = (F.pad(x, (0, num_channels + spare)) for x in (call.query, call.key))
    padding = call.key.new_zeros(*call.key.shape[:-1], spare)
    value = torch.cat((call.key, call.value, padding), dim=-1)
    # The kernel's causality needs no mask, but aligns the first query with the first key.
    causal = call.causal and call.mask is None and query.shape[2] == key.shape[2]
    rest = call._replace(causal=call.causal and not causal)
    alike = not rest.causal and (call.mask is None or call.mask.shape[2] == 1)
    for queries, keys, bias, num_keys in _blocks(rest, query.shape[2] if alike else BLOCK):
        mean_BHTD, log_partition = _fused_kernel(
            query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            is_causal=causal,
            attn_mask=bias,
            scale=call.factor,
        )
        mean_key_BHTD, sums_BHTC, _ = mean_BHTD.split([width, num_channels, spare], dim=-1)
        mean_score = call.factor * torch.linalg.vecdot(call.query[:, :, queries], mean_key_BHTD)
        # Rounding may make the difference negative.
        entropy = (log_partition - mean_score).clamp(min=0)
        if causal:
            num_keys = (torch.arange(query.shape[2]) + 1).expand_as(num_keys)
        yield _block_statistics(num_keys, log_partition, mean_score, entropy, sums_BHTC)


def _plain_parts(call: AttentionCall, heat: bool) -> Iterator[AttentionStatistics]:
    """Yield statistics block by block from the scores of the queries."""
    query, key = call.query, call.key
    if not call.scored:
        # Products of strided keys would copy them again for each block.
        query, key = query * call.factor, key.contiguous()
    for queries, keys, bias, num_keys in _blocks(call, BLOCK):
        empty = num_keys == 0
        if call.scored:
            assert bias is not None
            scores = bias
        else:
            scores = grouped_matmul(query[:, :, queries], key[:, :, keys].mT)
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            scores = scores if bias is None else scores.add_(bias)
        peak = scores.amax(dim=-1).masked_fill(empty, 0)
        weights = scores.softmax(dim=-1)
        if bool(empty.any()):
            weights.masked_fill_(empty.unsqueeze(-1), 0)
        # The largest weight is 1/Z with Z the sum of exp(score - peak).
        log_total = -weights.amax(dim=-1).masked_fill(empty, 1).log()
        # A key without weight contributes 0: any finite number can replace a score of -inf.
        reduced = scores.sub_(peak.unsqueeze(-1)).clamp_(min=-_WEIGHTLESS)
        mean = torch.linalg.vecdot(weights, reduced)
        sums_BHTC = grouped_matmul(weights, call.value[:, :, keys])
        part = _block_statistics(num_keys, peak + log_total, peak + mean, log_total - mean, sums_BHTC)
        if heat:
            variance = torch.linalg.vecdot(weights, reduced.sub_(mean.unsqueeze(-1)).square_())
            part = replace(part, heat_capacity=variance, max_score=peak.masked_fill(empty, -math.inf))
        yield part


def grouped_matmul(x_BHTN: Tensor, y_BGNM: Tensor) -> Tensor:
    """Return (B, H, T, M): each query head times the matrix of its group, without repeating that."""
    B, H, T, N = x_BHTN.shape
    G, M = y_BGNM.shape[1], y_BGNM.shape[3]
    return (x_BHTN.reshape(B, G, H // G * T, N) @ y_BGNM).view(B, H, T, M)


def _block_statistics(
    num_keys: Tensor, log_partition: Tensor, mean_score: Tensor, entropy: Tensor, sums_BHTC: Tensor
) -> AttentionStatistics:
    """Return a block's statistics, with the documented values for queries that may see nothing."""
    empty = num_keys == 0
    norm, mass, norm_of_set = sums_BHTC.unbind(dim=-1)
    return AttentionStatistics(
        log_partition=log_partition.masked_fill(empty, -math.inf),
        mean_score=mean_score,
        entropy=entropy,
        effective_keys=entropy.exp().masked_fill(empty, 0),
        mass=mass,
        impact=norm_of_set / norm.masked_fill(norm == 0, 1),
        num_keys=num_keys,
    )


def join_parts(parts: list[AttentionStatistics], dim: int) -> AttentionStatistics:
    """Concatenate statistics along an axis."""
    # A single part is copied too: it is a view of the kernel's whole result.
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(AttentionStatistics)}
    given = {name: column for name, column in columns.items() if column[0] is not None}
    return AttentionStatistics(**{name: torch.cat(column, dim=dim) for name, column in given.items()})


def indicator(keys: KeySet, k_BGSD: Tensor) -> Tensor:
    """Return the key set as a bool tensor, (S,) or (B, S)."""
    B, _, S, _ = k_BGSD.shape
    if isinstance(keys, Tensor):
        if keys.dtype != torch.bool or tuple(keys.shape) not in ((S,), (B, S)):
            expected = f"positions or a bool tensor {(S,)} or {(B, S)}"
            raise InputError("keys", expected=expected, got=(keys.dtype, tuple(keys.shape)))
        return keys
    if outside := [position for position in keys if type(position) is not int or not 0 <= position < S]:
        raise InputError("keys", expected=f"positions from 0 to {S - 1}, the last of k", got=outside)
    in_set = torch.zeros(S, dtype=torch.bool)
    in_set[list(keys)] = True
    return in_set


def _validate_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or 0 in tensor.shape[1::2]:
            raise InputError(name, expected="(batch, heads, positions, width)", got=tuple(tensor.shape))
        if tensor.dtype != q.dtype or not tensor.is_floating_point():
            raise TypeError(f"q, k and v must have one floating dtype; q has {q.dtype}, {name} has {tensor.dtype}.")
    (B, H, _, D), (_, G, S, _) = q.shape, k.shape
    if k.shape[0] != B or k.shape[3] != D or H % G or S == 0:
        expected = f"({B}, a divisor of {H}, at least 1, {D}), to fit q"
        raise InputError("k", expected=expected, got=tuple(k.shape))
    if v.shape[:3] != k.shape[:3]:
        raise InputError("v", expected=f"({B}, {G}, {S}, any width), to fit k", got=tuple(v.shape))
