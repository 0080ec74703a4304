"""The attention call and its choice of kernel.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width,
C blocks of one shape, I queries of a block.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._validation import InputError
from tidegate.tensors import softmax
from tidegate.tensors.attention import attention_weights
from tidegate.tensors.spans import Blocks, KeyRun, Segment, plan_blocks

# Tuned by measurement (docs/lab-notes.md): shorter blocks skip more scores but start more products. Each block that
# begins at the first key is compiled separately, so their number is limited.
_SHORTEST_BLOCK, _LONGEST_BLOCK, _MOST_BLOCKS = 64, 512, 16

_WINDOW_BLOCKS = ((127, 64), (1024, 128))
"""(widest window, queries of a block) for blocks that do not see the first key."""
_LARGEST_WINDOW_BLOCK = 256


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
    """Return softmax attention (B, T, H, D); a fully masked row gives 0 with gradient 0.

    It uses `jax.nn.dot_product_attention`, which accumulates in float32 for any input and has neither dropout nor a
    sink: float64, dropout and sinks run on the plain reference. The kernel also computes the scores that causality and
    a window mask, so long sequences are split into blocks of queries, each with the keys that it can see. Blocks of
    equal shape run in a loop that is compiled once.

    Args:
        q_BTHD: Queries.
        k_BSGD: Keys.
        v_BSGD: Values.
        mask: Bool, broadcasts to (B, H, T, S), True = may attend.
        bias: Additive, broadcasts likewise; -inf masks.
        causal: Query i sees keys up to i.
        window: Number of keys that a query sees, including itself; only backward if causal, else to both sides.
        scale: Factor of the scores.
        sink: (H,), a logit of each head in the softmax's denominator, without a value.
        dropout: Dropout probability of the attention weights.
        dropout_key: Required with dropout.
    """
    num_queries, num_keys = q_BTHD.shape[1], k_BSGD.shape[1]
    if dropout > 0 or q_BTHD.dtype == jnp.float64:
        allowed = _both(mask, _band(num_queries, _limits(num_keys, causal, window)))
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
    inputs = _Inputs(q_BTHD, k_BSGD, v_BSGD, mask, bias, sink)
    parts = [
        _attend_in_turn(inputs, blocks=blocks, scale=scale)
        if len(blocks.queries) > 1
        else _attend_block(inputs, blocks, blocks.queries[0], blocks.origins[0], scale=scale)
        for blocks in _plan(num_queries, num_keys, causal, window)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


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
    """Return `attend` computed through the score matrix, in float32 or better."""
    batch, num_queries, num_heads, width = q_BTHD.shape
    num_keys, groups = k_BSGD.shape[1:3]
    scores_BHTS = _scores(q_BTHD, k_BSGD, bias, scale)
    if sink is None:
        weights_BHTS = attention_weights(scores_BHTS, mask)
    else:
        allowed_BHTS = scores_BHTS if mask is None else jnp.where(mask, scores_BHTS, -jnp.inf)
        weights_BHTS, _ = _weights_beside_sink(sink.astype(scores_BHTS.dtype), allowed_BHTS)
    weights_BHTS = weights_BHTS.astype(q_BTHD.dtype)
    if dropout > 0:
        if dropout_key is None:
            raise InputError("dropout_key", expected="a key with dropout above 0", got=None)
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, weights_BHTS.shape)
        weights_BHTS = jnp.where(kept, weights_BHTS / (1 - dropout), 0)
    members = num_heads // groups
    weights = weights_BHTS.reshape(batch, groups, members * num_queries, num_keys)
    o = jnp.einsum("bgns,bsgd->bgnd", weights, v_BSGD).reshape(batch, groups, members, num_queries, width)
    return jnp.moveaxis(o, 3, 1).reshape(q_BTHD.shape)


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
    """Return the log-partition of the keys (B, T, H), -inf with gradient 0 for a fully masked row; see `attend`."""
    scores_BHTS = _scores(q_BTHD, k_BSGD, bias, scale)
    allowed = _both(mask, _band(q_BTHD.shape[1], _limits(k_BSGD.shape[1], causal, window)))
    return jnp.swapaxes(softmax.log_partition(scores_BHTS, mask=allowed), 1, 2)


def _scores(q_BTHD: Array, k_BSGD: Array, bias: Array | None, scale: float) -> Array:
    """Return the scores (B, H, T, S), in float32 or better."""
    batch, num_queries, num_heads, width = q_BTHD.shape
    num_keys, groups = k_BSGD.shape[1:3]
    if q_BTHD.dtype == jnp.float16:
        # Not every platform has a float16 product that accumulates in float32.
        q_BTHD, k_BSGD = q_BTHD.astype(jnp.float32), k_BSGD.astype(jnp.float32)
    # With the queries of a group in sequence, the scores need no transpose.
    members = num_heads // groups
    grouped = jnp.moveaxis(q_BTHD.reshape(batch, num_queries, groups, members, width), 1, 3)
    grouped = grouped.reshape(batch, groups, members * num_queries, width)
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    scores = jnp.einsum("bgnd,bsgd->bgns", grouped, k_BSGD, preferred_element_type=wide)
    scores_BHTS = scores.reshape(batch, num_heads, num_queries, num_keys) * scale
    return scores_BHTS if bias is None else scores_BHTS + bias


@jax.custom_jvp
def _weights_beside_sink(sink_H: Array, scores_BHTS: Array) -> tuple[Array, Array]:
    """Return the weights of the keys in a softmax with a sink for each head, and the sink's weight (B, H, T, 1)."""
    sink_H11 = sink_H[:, None, None]
    # A shift does not change the weights; the sink keeps this one finite in a fully masked row.
    peak = jnp.maximum(jnp.max(scores_BHTS, axis=-1, keepdims=True, initial=-jnp.inf), sink_H11)
    factors_BHTS = jnp.exp(scores_BHTS - peak)
    factor_BHT1 = jnp.exp(sink_H11 - peak)
    total_BHT1 = jnp.sum(factors_BHTS, axis=-1, keepdims=True) + factor_BHT1
    return factors_BHTS / total_BHT1, factor_BHT1 / total_BHT1


@_weights_beside_sink.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Differentiate like `jax.nn.softmax`, which keeps only the weights."""
    weights_BHTS, on_sink_BHT1 = _weights_beside_sink(*primals)
    by_sink_H11, by_scores_BHTS = tangents[0][:, None, None], tangents[1]
    mean_BHT1 = jnp.sum(weights_BHTS * by_scores_BHTS, axis=-1, keepdims=True) + on_sink_BHT1 * by_sink_H11
    slopes = weights_BHTS * (by_scores_BHTS - mean_BHT1), on_sink_BHT1 * (by_sink_H11 - mean_BHT1)
    return (weights_BHTS, on_sink_BHT1), slopes


def _plan(num_queries: int, num_keys: int, causal: bool, window: int | None) -> tuple[Blocks, ...]:
    """Return blocks in the order of their queries, each with one run of keys."""
    reach = num_keys if window is None else window - 1
    sees_all = not causal and window is None
    if sees_all or num_queries != num_keys or num_queries < 2 * _SHORTEST_BLOCK:
        return (Blocks(num_queries, (_limits(num_keys, causal, window),), range(1), range(1)),)
    if not causal and reach > _LARGEST_WINDOW_BLOCK:
        # `plan_blocks` would make many blocks near the last key, each compiled separately.
        length = max(_LONGEST_BLOCK, math.ceil(num_queries / _MOST_BLOCKS))
        return tuple(
            _two_sided_block(start, min(start + length, num_queries), reach, num_keys)
            for start in range(0, num_queries, length)
        )
    segments = [Segment(0, num_queries, 0, num_keys)]
    if causal:
        # The kernel also computes masked scores, so queries that see the first key are split too.
        head = min(reach, num_queries)
        third = 16 * math.ceil(head / 48)
        length = min(max(_SHORTEST_BLOCK, third), max(_LONGEST_BLOCK, math.ceil(head / _MOST_BLOCKS)))
        cuts = [*range(0, head, length), head]
        segments = [Segment(start, stop - start, 0, stop) for start, stop in pairwise(cuts)]
        if head < num_queries:
            segments.append(Segment(head, num_queries - head, 0, num_keys))
    size = next((size for widest, size in _WINDOW_BLOCKS if reach < widest), _LARGEST_WINDOW_BLOCK)
    return plan_blocks(segments, causal=causal, window=window, size=size, least_keys=num_keys + 1)


def _two_sided_block(start: int, stop: int, reach: int, num_keys: int) -> Blocks:
    """Return the block of queries from start to stop, with all keys at most `reach` positions from one of them."""
    first, last = max(0, start - reach), min(stop + reach, num_keys)
    run = KeyRun(0, last - first, low=start - first - reach, high=start - first + reach)
    return Blocks(stop - start, (run,), range(start, start + 1), range(first, first + 1))


class _Inputs(NamedTuple):
    """The arrays of one call, as `attend` takes them."""

    q_BTHD: Array
    k_BSGD: Array
    v_BSGD: Array
    mask: Array | None
    bias: Array | None
    sink: Array | None


@functools.partial(jax.jit, static_argnames=("blocks", "scale"))
def _attend_in_turn(inputs: _Inputs, *, blocks: Blocks, scale: float) -> Array:
    """Attend block by block in a loop that is compiled once: the scores of one block fit into the processor's cache."""

    def attend_one(starts: tuple[Array, Array]) -> Array:
        return _attend_block(inputs, blocks, *starts, scale=scale)

    o_CBIHD = jax.lax.map(attend_one, (jnp.asarray(blocks.queries), jnp.asarray(blocks.origins)))
    return jnp.moveaxis(o_CBIHD, 0, 1).reshape(inputs.q_BTHD.shape[0], -1, *inputs.q_BTHD.shape[2:])


def _attend_block(
    inputs: _Inputs, blocks: Blocks, first_query: Array | int, origin: Array | int, *, scale: float
) -> Array:
    """Return the output of one block's queries; its run of keys is counted from `origin`."""
    (run,) = blocks.runs
    first_key = origin + run.start
    num_queries, num_keys = blocks.num_queries, run.num_keys
    q_BTHD = _part(inputs.q_BTHD, first_query, num_queries, axis=1)
    k_BSGD, v_BSGD = (_part(x, first_key, num_keys, axis=1) for x in (inputs.k_BSGD, inputs.v_BSGD))
    mask, bias = (
        None if x is None else _part(_part(x, first_query, num_queries, axis=-2), first_key, num_keys, axis=-1)
        for x in (inputs.mask, inputs.bias)
    )
    allowed = _both(mask, _band(num_queries, run))
    if inputs.sink is not None:
        return attend_plainly(q_BTHD, k_BSGD, v_BSGD, mask=allowed, bias=bias, scale=scale, sink=inputs.sink)
    if mask is None and bias is None and run.low is None and run.high in (None, 0):
        return _attend_fused(q_BTHD, k_BSGD, v_BSGD, causal=run.high == 0, scale=scale)
    if bias is None:
        assert allowed is not None
        return _zero_where_empty(_attend_fused(q_BTHD, k_BSGD, v_BSGD, mask=allowed, scale=scale), allowed)
    # Not `>`, which would mask a nan.
    finite = bias != -jnp.inf
    allowed = finite if allowed is None else allowed & finite
    # The kernel masks with a finite number, which a bias may fall below, so mask with -inf.
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
    scale: float,
) -> Array:
    dtype = q_BTHD.dtype
    if dtype == jnp.float16:
        # Not every platform has the float16 product that the kernel uses.
        q_BTHD, k_BSGD, v_BSGD = (x.astype(jnp.float32) for x in (q_BTHD, k_BSGD, v_BSGD))
    o_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BSGD, v_BSGD, mask=mask, bias=bias, scale=scale, is_causal=causal)
    return o_BTHD.astype(dtype)


def _limits(num_keys: int, causal: bool, window: int | None) -> KeyRun:
    """Return all keys as one run, for queries and keys that start at the same position."""
    back = None if window is None else window - 1
    return KeyRun(0, num_keys, None if back is None else -back, 0 if causal else back)


def _band(num_queries: int, run: KeyRun) -> Array | None:
    """Return the mask (T, S) of a run; None if every query sees all its keys."""
    if run.low is None and run.high is None:
        return None
    distance = jnp.arange(run.num_keys) - jnp.arange(num_queries)[:, None]
    near = jnp.ones_like(distance, dtype=bool) if run.low is None else distance >= run.low
    return near if run.high is None else near & (distance <= run.high)


def _part(x: Array, start: Array | int, length: int, *, axis: int) -> Array:
    """Slice an axis; leave an axis that broadcasts."""
    if x.shape[axis] in (1, length):
        return x
    if isinstance(start, int):
        return jax.lax.slice_in_dim(x, start, start + length, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, start, length, axis=axis)


def _both(first: Array | None, second: Array | None) -> Array | None:
    """Return the intersection of two masks; None allows everything."""
    return second if first is None else first if second is None else first & second


def _zero_where_empty(o_BTHD: Array, allowed: Array) -> Array:
    """Set rows with no visible key to 0; the kernel would average all keys."""
    sees_BHT = jnp.any(allowed, axis=-1)
    sees_BHT = jnp.broadcast_to(sees_BHT, (o_BTHD.shape[0], o_BTHD.shape[2], o_BTHD.shape[1]))
    return jnp.where(jnp.swapaxes(sees_BHT, 1, 2)[..., None], o_BTHD, 0)
