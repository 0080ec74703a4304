"""The one attention call, and which kernel serves it.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from tidegate.tensors import softmax
from tidegate.tensors.attention import attention_weights

# Found by measuring, as docs/lab-notes.md tells: shorter blocks leave out more and start more products. Each block is
# compiled by itself, so that there are not too many.
_SHORTEST_BLOCK, _LONGEST_BLOCK, _MOST_BLOCKS = 64, 512, 16


def attend(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float,
    sink: Array | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """Softmax attention (B, T, H, D); a row that may see nothing gives 0 with gradient 0.

    `jax.nn.dot_product_attention`, except where it falls short: it accumulates in float32 whatever the input and has
    neither dropout nor a sink, so that float64, dropout and sinks run on the plain reference. It computes also the
    scores that causality and a window forbid: so long sequences are cut into blocks of queries, each with the keys that
    it can see.

    mask   : bool, broadcasts to (B, H, T, S), True = may attend
    bias   : additive, broadcasts likewise; -inf forbids
    causal : query i sees keys up to i
    window : keys that a query sees, itself included; back alone if causal, else to both sides
    sink   : (H,), a logit of each head in the softmax's denominator, whose weight goes nowhere
    """
    num_queries, num_keys = q_BTHD.shape[1], k_BSGD.shape[1]
    if dropout > 0 or q_BTHD.dtype == jnp.float64:
        allowed = _both(mask, _band(num_queries, num_keys, causal, window))
        return attend_plainly(
            q_BTHD,
            k_BSGD,
            v_BSGD,
            mask=allowed,
            bias=bias,
            scale=scale,
            sink=sink,
            dropout=dropout,
            dropout_key=dropout_key,
        )
    blocks = [
        _attend_block(
            q_BTHD[:, rows],
            k_BSGD[:, keys],
            v_BSGD[:, keys],
            mask=_part(mask, rows, keys),
            bias=_part(bias, rows, keys),
            causal=causal,
            window=window,
            ahead=rows.start - keys.start,
            scale=scale,
            sink=sink,
        )
        for rows, keys in _blocks(num_queries, num_keys, causal, window)
    ]
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def attend_plainly(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    *,
    mask: Array | None,
    bias: Array | None,
    scale: float,
    sink: Array | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """The same through the score matrix, float32 or better; arguments as in `attend`."""
    batch, num_queries, num_heads, _ = q_BTHD.shape
    num_keys, groups = k_BSGD.shape[1:3]
    scores_BHTS = _scores(q_BTHD, k_BSGD, bias, scale)
    weights_BHTS = attention_weights(scores_BHTS, mask) if sink is None else _weights_beside(sink, scores_BHTS, mask)
    weights_BHTS = weights_BHTS.astype(q_BTHD.dtype)
    if dropout > 0:
        if dropout_key is None:
            raise ValueError("dropout needs a source of randomness; give a key, or be deterministic.")
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, weights_BHTS.shape)
        weights_BHTS = jnp.where(kept, weights_BHTS / (1 - dropout), 0)
    weights = weights_BHTS.reshape(batch, groups, num_heads // groups, num_queries, num_keys)
    return jnp.einsum("bgmts,bsgd->btgmd", weights, v_BSGD).reshape(q_BTHD.shape)


def log_partition(
    q_BTHD: Array,
    k_BSGD: Array,
    *,
    mask: Array | None,
    bias: Array | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> Array:
    """Logarithm of the partition function of the keys (B, T, H), -inf for a row that may see nothing, with gradient 0.

    The arguments are those of `attend`.
    """
    scores_BHTS = _scores(q_BTHD, k_BSGD, bias, scale)
    allowed = _both(mask, _band(q_BTHD.shape[1], k_BSGD.shape[1], causal, window))
    return jnp.swapaxes(softmax.log_partition(scores_BHTS, mask=allowed), 1, 2)


def _scores(q_BTHD: Array, k_BSGD: Array, bias: Array | None, scale: float) -> Array:
    """(B, H, T, S), in float32 or better."""
    batch, num_queries, num_heads, width = q_BTHD.shape
    num_keys, groups = k_BSGD.shape[1:3]
    if q_BTHD.dtype == jnp.float16:
        # Not every platform has a product of float16 that accumulates in float32.
        q_BTHD, k_BSGD = q_BTHD.astype(jnp.float32), k_BSGD.astype(jnp.float32)
    grouped = q_BTHD.reshape(batch, num_queries, groups, num_heads // groups, width)
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    scores = jnp.einsum("btgmd,bsgd->bgmts", grouped, k_BSGD, preferred_element_type=wide)
    scores_BHTS = scores.reshape(batch, num_heads, num_queries, num_keys) * scale
    return scores_BHTS if bias is None else scores_BHTS + bias


def _weights_beside(sink: Array, scores_BHTS: Array, mask: Array | None) -> Array:
    """The weights of the keys in a softmax that has a sink of each head (H,) too, whose weight is left out."""
    if mask is not None:
        scores_BHTS = jnp.where(mask, scores_BHTS, -jnp.inf)
    sink_H11 = sink.astype(scores_BHTS.dtype)[:, None, None]
    # No shift changes the weights; the sink is finite, so that this one is, also where no key may be seen.
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores_BHTS, axis=-1, keepdims=True), sink_H11))
    factors_BHTS = jnp.exp(scores_BHTS - peak)
    return factors_BHTS / (jnp.sum(factors_BHTS, axis=-1, keepdims=True) + jnp.exp(sink_H11 - peak))


def _blocks(num_queries: int, num_keys: int, causal: bool, window: int | None) -> list[tuple[slice, slice]]:
    """Ranges of queries, each with the range of keys that it can see by causality and window."""
    sees_all = not causal and window is None
    if sees_all or num_queries != num_keys or num_queries < 2 * _SHORTEST_BLOCK:
        return [(slice(0, num_queries), slice(0, num_keys))]
    third = 16 * math.ceil(num_queries / 48)
    length = min(max(_SHORTEST_BLOCK, third), max(_LONGEST_BLOCK, math.ceil(num_queries / _MOST_BLOCKS)))
    reach = num_keys if window is None else window - 1
    rows = [slice(start, min(start + length, num_queries)) for start in range(0, num_queries, length)]
    return [
        (row, slice(max(0, row.start - reach), row.stop if causal else min(row.stop + reach, num_keys))) for row in rows
    ]


def _attend_block(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    *,
    mask: Array | None,
    bias: Array | None,
    causal: bool,
    window: int | None,
    ahead: int,
    scale: float,
    sink: Array | None,
) -> Array:
    """One call of the kernel, the first query standing `ahead` positions after the first key; else as in `attend`."""
    num_queries, num_keys = q_BTHD.shape[1], k_BSGD.shape[1]
    if sink is not None:
        allowed = _both(mask, _band(num_queries, num_keys, causal, window, ahead=ahead))
        return attend_plainly(q_BTHD, k_BSGD, v_BSGD, mask=allowed, bias=bias, scale=scale, sink=sink)
    unmasked = mask is None and bias is None
    if unmasked and ahead == 0 and (window is None or num_queries == num_keys):
        return _attend_fused(q_BTHD, k_BSGD, v_BSGD, causal=causal, window=window, scale=scale)
    allowed = _both(mask, _band(num_queries, num_keys, causal, window, ahead=ahead))
    if bias is None:
        assert allowed is not None
        return _zero_where_empty(_attend_fused(q_BTHD, k_BSGD, v_BSGD, mask=allowed, scale=scale), allowed)
    # Not `>`, which would hide a nan as if it were forbidden.
    finite = bias != -jnp.inf
    allowed = finite if allowed is None else allowed & finite
    # The kernel marks what a mask forbids by a finite number, which a bias may fall below; nothing falls below -inf.
    bias = jnp.where(allowed, bias, jnp.where(jnp.any(allowed, axis=-1, keepdims=True), -jnp.inf, 0))
    return _zero_where_empty(_attend_fused(q_BTHD, k_BSGD, v_BSGD, bias=bias, scale=scale), allowed)


def _attend_fused(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float,
) -> Array:
    dtype = q_BTHD.dtype
    if dtype == jnp.float16:
        # The kernel asks for a product of float16 that accumulates in float32, which not every platform has.
        q_BTHD, k_BSGD, v_BSGD = (x.astype(jnp.float32) for x in (q_BTHD, k_BSGD, v_BSGD))
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BSGD,
        v_BSGD,
        mask=mask,
        bias=bias,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0 if causal else window - 1),
    ).astype(dtype)


def _band(num_queries: int, num_keys: int, causal: bool, window: int | None, *, ahead: int = 0) -> Array | None:
    """(T, S) bool: no key ahead if causal, and only keys fewer than `window` positions away; None sees everything."""
    if not causal and window is None:
        return None
    distance = ahead + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    allowed = distance >= 0 if causal else jnp.ones_like(distance, dtype=bool)
    return allowed if window is None else allowed & (abs(distance) < window)


def _part(mask: Array | None, rows: slice, keys: slice) -> Array | None:
    """Of a mask or bias that broadcasts to (B, H, T, S), what belongs to these queries and keys."""
    if mask is None:
        return None
    mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., keys]


def _both(first: Array | None, second: Array | None) -> Array | None:
    """What both masks allow; None allows everything."""
    return second if first is None else first if second is None else first & second


def _zero_where_empty(o_BTHD: Array, allowed: Array) -> Array:
    """Set rows with no visible key to 0; the kernel would average all keys."""
    sees_BHT = jnp.any(allowed, axis=-1)
    sees_BHT = jnp.broadcast_to(sees_BHT, (o_BTHD.shape[0], o_BTHD.shape[2], o_BTHD.shape[1]))
    return jnp.where(jnp.swapaxes(sees_BHT, 1, 2)[..., None], o_BTHD, 0)
