"""Which keys a query may see. One polarity everywhere: True means "may attend"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.tensors._checks import (
    is_false,
    require_batches_broadcast,
    require_count,
    require_floating,
    require_mask,
    require_rank,
)
from tidegate.tensors.namespace import namespace_of, unify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.tensors.namespace import Array, Namespace

__all__ = [
    "apply_mask",
    "attention_mask_from_padding",
    "block_sparse_mask",
    "causal_mask",
    "causal_mask_with_window",
    "causal_padding_mask",
    "document_mask",
    "global_local_mask",
    "local_attention_mask",
    "mask_to_additive",
    "padding_mask",
    "strided_attention_mask",
    "visualize_mask",
]


def causal_mask(n: int, *, xp: Namespace = np) -> Array:
    r"""Let a query see itself and what came before: $j \le i$.

    returns : (n, n) bool
    """
    return _offsets(n, xp) >= 0


def causal_mask_with_window(n: int, window: int, *, xp: Namespace = np) -> Array:
    r"""Let a query see the last `window` keys, itself included: $0 \le i - j < \text{window}$.

    returns : (n, n) bool; the identity for window 1, `causal_mask(n)` for window n or more
    """
    require_count(1, window=window)
    offsets = _offsets(n, xp)
    return (offsets >= 0) & (offsets < window)


def local_attention_mask(n: int, window: int, *, xp: Namespace = np) -> Array:
    r"""Let a query see a window of keys centred on itself: $|i - j| \le \lfloor \text{window} / 2 \rfloor$.

    A row in the middle has `window` keys if that is odd, one more if it is even; a window of 1 is the query itself.

    returns : (n, n) bool, symmetric
    """
    require_count(1, window=window)
    return abs(_offsets(n, xp)) <= window // 2


def strided_attention_mask(n: int, stride: int, *, xp: Namespace = np) -> Array:
    r"""Let a query see every `stride`-th key, counted from itself: $(i - j) \bmod \text{stride} = 0$.

    It looks both ways; for a causal one take the intersection with `causal_mask`.

    returns : (n, n) bool, symmetric; all True for stride 1
    """
    require_count(1, stride=stride)
    return _offsets(n, xp) % stride == 0


def block_sparse_mask(n: int, block_size: int, *, xp: Namespace = np) -> Array:
    r"""Let a query see its own block: $\lfloor i/b \rfloor = \lfloor j/b \rfloor$ for block size b.

    The last block is shorter when block_size does not divide n.

    returns : (n, n) bool, block diagonal
    """
    require_count(1, n=n, block_size=block_size)
    block = xp.arange(n) // block_size
    return block[:, None] == block[None, :]


def global_local_mask(n: int, window: int, global_tokens: int | Sequence[int], *, xp: Namespace = np) -> Array:
    r"""`local_attention_mask`, and some global tokens that see every key and are seen by every query.

    global_tokens : how many of the first tokens are global, or the positions of the global ones
    returns       : (n, n) bool, symmetric
    """
    local = local_attention_mask(n, window, xp=xp)
    is_global = xp.asarray(np.isin(np.arange(n), _global_positions(n, global_tokens)))
    return local | is_global[:, None] | is_global[None, :]


def padding_mask(lengths: Array, max_len: int) -> Array:
    r"""True on the first `length` positions of each sequence, False on its padding.

    lengths : (...) integer, each from 0 to max_len
    returns : (..., max_len) bool, of the kind of `lengths`
    """
    return _padding_mask(max_len, "max_len", lengths=lengths)


def attention_mask_from_padding(query_lengths: Array, key_lengths: Array, max_q: int, max_k: int) -> Array:
    r"""Real queries see real keys: $i < \text{query length}$ and $j < \text{key length}$.

    The row of a padded query is all False.

    query_lengths : (...) integer, each from 0 to max_q
    key_lengths   : (...) integer, each from 0 to max_k
    returns       : (..., max_q, max_k) bool
    """
    _, query_lengths, key_lengths = unify(query_lengths=query_lengths, key_lengths=key_lengths)
    queries = _padding_mask(max_q, "max_q", query_lengths=query_lengths)
    keys = _padding_mask(max_k, "max_k", key_lengths=key_lengths)
    require_batches_broadcast(0, query_lengths=query_lengths, key_lengths=key_lengths)
    return queries[..., :, None] & keys[..., None, :]


def causal_padding_mask(lengths: Array, max_len: int) -> Array:
    r"""Real queries see the real keys up to themselves: $j \le i < \text{length}$.

    The row of a padded query is all False.

    lengths : (...) integer, each from 0 to max_len
    returns : (..., max_len, max_len) bool
    """
    real = padding_mask(lengths, max_len)
    _, real, causal = unify(lengths=real, causal=causal_mask(max_len))
    return causal & real[..., :, None] & real[..., None, :]


def document_mask(query_documents: Array, key_documents: Array) -> Array:
    r"""Let a query see its own document in a row of packed documents: the ids are equal.

    Padding that carries an id of its own sees itself: combine with `padding_mask` to shut it out.

    query_documents : (..., query) integer, the id of the document at each position
    key_documents   : (..., key) integer
    returns         : (..., query, key) bool
    """
    _, queries, keys = unify(query_documents=query_documents, key_documents=key_documents)
    _require_integer(query_documents=queries, key_documents=keys)
    require_rank("position", query_documents=queries, key_documents=keys)
    require_batches_broadcast(1, query_documents=queries, key_documents=keys)
    return queries[..., :, None] == keys[..., None, :]


def apply_mask(scores: Array, mask: Array, fill_value: float = -1e9) -> Array:
    r"""Keep the scores where the mask is True, and put `fill_value` elsewhere.

    The finite fill keeps a row that may see nothing free of nan, but its softmax is uniform: `attention_weights` with
    a mask gives zeros instead. Masked scores get gradient 0, whatever they are. A finite fill beyond the dtype's range
    becomes its nearest finite number.

    scores  : (..., query, key)
    mask    : bool, broadcasts to the scores
    returns : like scores
    """
    xp, scores, mask = unify(scores=scores, mask=mask)
    require_floating(scores=scores)
    require_rank("query, key", scores=scores)
    require_mask(mask, tuple(scores.shape))
    return _fill(xp, scores, mask, fill_value)


def mask_to_additive(mask: Array, fill_value: float = -1e9, *, dtype: Any = None) -> Array:
    r"""Return what to add to scores instead of masking them: 0 where True, `fill_value` where False.

    mask    : (..., query, key) bool
    dtype   : floating dtype of the result; None is the default one of the mask's library
    returns : like mask; a finite fill beyond the dtype's range becomes its nearest finite number
    """
    xp, mask = unify(mask=mask)
    _require_full_mask(mask)
    dtype = xp.zeros(()).dtype if dtype is None else dtype
    if not xp.isdtype(dtype, "real floating"):
        raise TypeError(f"dtype must be a real floating dtype; got {dtype}.")
    return _fill(xp, xp.zeros_like(mask, dtype=dtype), mask, fill_value)


def visualize_mask(mask: Array) -> str:
    r"""Draw the mask as text: one line per query, `#` for a key that it may see and `.` for one that it may not.

    mask    : (..., query, key) bool, with concrete values
    returns : a string; the masks of a batch follow each other with an empty line between
    """
    xp, mask = unify(mask=mask)
    _require_full_mask(mask)
    *batch, num_queries, num_keys = mask.shape
    drawings = xp.reshape(mask, (math.prod(batch), num_queries, num_keys)).tolist()
    return "\n\n".join("\n".join("".join(".#"[seen] for seen in row) for row in rows) for rows in drawings)


def _offsets(n: int, xp: Namespace) -> Array:
    """How far each key lies back from each query, i - j."""
    require_count(1, n=n)
    position = xp.arange(n)
    return position[:, None] - position[None, :]


def _global_positions(n: int, global_tokens: int | Sequence[int]) -> list[int]:
    values: list[Any] = np.atleast_1d(global_tokens).tolist()
    for value in values:
        require_count(0, global_tokens=value)
    if np.ndim(global_tokens) == 0:
        values = list(range(values[0]))
    if max(values, default=0) >= n:
        raise ValueError(f"global_tokens must be positions below n = {n}, or how many; got {global_tokens!r}.")
    return values


def _padding_mask(size: int, size_name: str, **lengths: Array) -> Array:
    require_count(1, **{size_name: size})
    xp, array, positions = unify(**lengths, positions=np.arange(size))
    (name,) = lengths
    _require_integer(**{name: array})
    # A narrow integer dtype may not hold `size`.
    array = xp.astype(array, positions.dtype, copy=False)
    if is_false((array >= 0) & (array <= size)):
        raise ValueError(f"{name} must lie between 0 and {size_name} = {size}; got {lengths[name]}.")
    return positions < array[..., None]


def _require_integer(**arrays: Array) -> None:
    for name, array in arrays.items():
        if not namespace_of(array).isdtype(array.dtype, "integral"):
            raise TypeError(f"{name} must have an integer dtype; got {array.dtype}.")


def _require_full_mask(mask: Array) -> None:
    require_rank("query, key", mask=mask)
    require_mask(mask, tuple(mask.shape))


def _fill(xp: Namespace, scores: Array, mask: Array, fill_value: float) -> Array:
    if math.isnan(fill_value):
        raise ValueError("fill_value must be a number; got nan.")
    if math.isfinite(fill_value):
        limits = xp.finfo(scores.dtype)
        fill_value = min(max(fill_value, float(limits.min)), float(limits.max))
    return xp.where(mask, scores, fill_value)
