"""Attention masks; True means "may attend"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.tensors._checks import (
    broadcast_batches,
    is_false,
    require_count,
    require_floating,
    require_mask,
    require_rank,
)
from tidegate.tensors.namespace import Array, Namespace, namespace_of, unify


def causal_mask(n: int, *, xp: Namespace = np) -> Array:
    r"""Return the (n, n) mask of the keys up to the query, $j \le i$."""
    return _offsets(n, xp) >= 0


def causal_mask_with_window(n: int, window: int, *, xp: Namespace = np) -> Array:
    r"""Return the (n, n) mask of the last `window` keys, the query included: $0 \le i - j < window$.

    It is the identity for window 1, `causal_mask(n)` for window n or more.
    """
    require_count(1, window=window)
    offsets = _offsets(n, xp)
    return (offsets >= 0) & (offsets < window)


def local_attention_mask(n: int, window: int, *, xp: Namespace = np) -> Array:
    r"""Return the (n, n) mask of a window of keys centered on the query: $|i - j| \le \lfloor window / 2 \rfloor$.

    A row in the middle has `window` keys if that is odd, one more if it is even.
    """
    require_count(1, window=window)
    return abs(_offsets(n, xp)) <= window // 2


def strided_attention_mask(n: int, stride: int, *, xp: Namespace = np) -> Array:
    r"""Return the (n, n) mask of every `stride`-th key to both sides of the query: $(i - j) \bmod stride = 0$."""
    require_count(1, stride=stride)
    return _offsets(n, xp) % stride == 0


def block_sparse_mask(n: int, block_size: int, *, xp: Namespace = np) -> Array:
    r"""Return the (n, n) mask of a query's own block: $\lfloor i/b \rfloor = \lfloor j/b \rfloor$ for block size b."""
    require_count(1, n=n, block_size=block_size)
    block = xp.arange(n) // block_size
    return block[:, None] == block[None, :]


def global_local_mask(n: int, window: int, global_tokens: int | Sequence[int], *, xp: Namespace = np) -> Array:
    r"""Return `local_attention_mask` with global tokens that see every key and are seen by every query.

    Args:
        n: Number of tokens.
        window: Size of the local window.
        global_tokens: Number of leading tokens that are global, or the positions of the global tokens.
        xp: Array library of the mask.
    """
    local = local_attention_mask(n, window, xp=xp)
    positions: list[Any] = np.atleast_1d(global_tokens).tolist()
    for position in positions:
        require_count(0, global_tokens=position)
    if np.ndim(global_tokens) == 0:
        positions = list(range(positions[0]))
    if max(positions, default=0) >= n:
        expected = f"positions below n = {n}, or a number of tokens up to n"
        raise InputError("global_tokens", expected=expected, got=global_tokens)
    is_global = xp.asarray(np.isin(np.arange(n), positions))
    return local | is_global[:, None] | is_global[None, :]


def padding_mask(lengths: Array, max_len: int) -> Array:
    r"""Return the mask (..., max_len) of the first positions of each sequence, for lengths (...) from 0 to max_len."""
    return _padding_mask(max_len, "max_len", lengths=lengths)


def attention_mask_from_padding(query_lengths: Array, key_lengths: Array, max_q: int, max_k: int) -> Array:
    r"""Return the mask (..., max_q, max_k) of real queries and keys: $i < query length$ and $j < key length$.

    The lengths are (...) integers from 0 to max_q and max_k. The row of a padded query is all False.
    """
    _, query_lengths, key_lengths = unify(query_lengths=query_lengths, key_lengths=key_lengths)
    queries = _padding_mask(max_q, "max_q", query_lengths=query_lengths)
    keys = _padding_mask(max_k, "max_k", key_lengths=key_lengths)
    broadcast_batches(query_lengths=tuple(query_lengths.shape), key_lengths=tuple(key_lengths.shape))
    return queries[..., :, None] & keys[..., None, :]


def causal_padding_mask(lengths: Array, max_len: int) -> Array:
    r"""Return the mask (..., max_len, max_len) of real keys up to the query: $j \le i < length$.

    The row of a padded query is all False. Arguments as in `padding_mask`.
    """
    real = padding_mask(lengths, max_len)
    _, real, causal = unify(lengths=real, causal=causal_mask(max_len))
    return causal & real[..., :, None] & real[..., None, :]


def document_mask(query_documents: Array, key_documents: Array) -> Array:
    r"""Return the mask (..., query, key) of a row of packed documents: a query sees only its own document.

    Padding with its own id sees itself; combine with `padding_mask` to mask it.

    Args:
        query_documents: (..., query) integers, the id of the document at each position
        key_documents: (..., key) integers
    """
    _, queries, keys = unify(query_documents=query_documents, key_documents=key_documents)
    _require_integer(query_documents=queries, key_documents=keys)
    require_rank("..., position", query_documents=queries, key_documents=keys)
    broadcast_batches(query_documents=tuple(queries.shape)[:-1], key_documents=tuple(keys.shape)[:-1])
    return queries[..., :, None] == keys[..., None, :]


def apply_mask(scores: Array, mask: Array, fill_value: float = -1e9) -> Array:
    r"""Keep the scores where the mask is True, and put `fill_value` elsewhere.

    A finite fill avoids nan in a fully masked row, but its softmax is uniform; `attention_weights` with a mask gives
    zeros. Masked scores have gradient 0, even if they are nan. A finite fill is clipped to the dtype's range.
    """
    xp, scores, mask = unify(scores=scores, mask=mask)
    require_floating(scores=scores)
    require_rank("..., query, key", scores=scores)
    require_mask(mask, tuple(scores.shape))
    return _fill(xp, scores, mask, fill_value)


def mask_to_additive(mask: Array, fill_value: float = -1e9, *, dtype: Any = None) -> Array:
    r"""Return an additive mask: 0 where the mask (..., query, key) is True, `fill_value` where it is False.

    A finite fill is clipped to the dtype's range. `dtype` None is the default floating dtype of the mask's library.
    """
    xp, mask = unify(mask=mask)
    _require_full_mask(mask)
    dtype = xp.zeros(()).dtype if dtype is None else dtype
    if not xp.isdtype(dtype, "real floating"):
        raise TypeError(f"dtype must be a real floating dtype, got {dtype}.")
    return _fill(xp, xp.zeros_like(mask, dtype=dtype), mask, fill_value)


def visualize_mask(mask: Array) -> str:
    r"""Return the mask (..., query, key) as text: one line per query, `#` for a visible key and `.` otherwise.

    An empty line separates the masks of a batch.
    """
    xp, mask = unify(mask=mask)
    _require_full_mask(mask)
    *batch, num_queries, num_keys = mask.shape
    drawings = xp.reshape(mask, (math.prod(batch), num_queries, num_keys)).tolist()
    return "\n\n".join("\n".join("".join(".#"[seen] for seen in row) for row in rows) for rows in drawings)


def _offsets(n: int, xp: Namespace) -> Array:
    """Return the distances i - j from each query back to each key."""
    require_count(1, n=n)
    position = xp.arange(n)
    return position[:, None] - position[None, :]


def _padding_mask(size: int, size_name: str, **lengths: Array) -> Array:
    require_count(1, **{size_name: size})
    xp, array, positions = unify(**lengths, positions=np.arange(size))
    (name,) = lengths
    _require_integer(**{name: array})
    # A narrow integer dtype may not hold `size`.
    array = xp.astype(array, positions.dtype, copy=False)
    if is_false((array >= 0) & (array <= size)):
        raise InputError(name, expected=f"between 0 and {size_name} = {size}", got=lengths[name])
    return positions < array[..., None]


def _require_integer(**arrays: Array) -> None:
    for name, array in arrays.items():
        if not namespace_of(array).isdtype(array.dtype, "integral"):
            raise TypeError(f"{name} must have an integer dtype, got {array.dtype}.")


def _require_full_mask(mask: Array) -> None:
    require_rank("..., query, key", mask=mask)
    require_mask(mask, tuple(mask.shape))


def _fill(xp: Namespace, scores: Array, mask: Array, fill_value: float) -> Array:
    if math.isnan(fill_value):
        raise InputError("fill_value", expected="a number", got=fill_value)
    if math.isfinite(fill_value):
        limits = xp.finfo(scores.dtype)
        fill_value = min(max(fill_value, float(limits.min)), float(limits.max))
    return xp.where(mask, scores, fill_value)
