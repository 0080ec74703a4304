"""Multi-head attention, and the diversity and entropy of its heads.

Inputs are Q `(..., query, d_model)` and K, V `(..., key, d_model)`, to be projected by W_Q, W_K `(H, d_model, d_k)`,
W_V `(H, d_model, d_v)` and W_O `(H, d_v, d_model)`. Heads are `(..., H, position, d_k)` and weights
`(..., H, query, key)`. A mask is bool, True where a query may attend: `(query, key)` for all heads and batches alike,
or with every axis of the weights, any of size 1, so that a mask for each batch is `(..., 1, query, key)`.
"""

from __future__ import annotations

import math
from typing import Any

from tidegate._validation import InputError
from tidegate.tensors._checks import check_arrays, require_count, require_head_mask, require_rank
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.namespace import Array, accumulate, unify
from tidegate.tensors.random import normal, split
from tidegate.tensors.softmax import attention_entropy


def multihead_attention(
    Q: Array,
    K: Array,
    V: Array,
    W_Q: Array,
    W_K: Array,
    W_V: Array,
    W_O: Array,
    mask: Array | None = None,
    return_weights: bool = False,
) -> Any:
    r"""Return $Y = \sum_h \mathrm{softmax}(Q_h K_h^\top / \sqrt{d_k})\, V_h W_O^h$ with $Q_h = Q W_Q^h$.

    Returns:
        (..., query, d_model); with `return_weights` also the weights (..., H, query, key)
    """
    steps = _attend(Q, K, V, W_Q, W_K, W_V, W_O, mask)
    return (steps["output"], steps["weights"]) if return_weights else steps["output"]


def multihead_attention_batched(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mask: Array | None = None
) -> Array:
    """Return `multihead_attention` where each of Q, K and V has at least one batch axis."""
    _, Q, K, V = unify(Q=Q, K=K, V=V)
    require_rank("..., batch, query, d_model", Q=Q)
    require_rank("..., batch, key, d_model", K=K, V=V)
    return multihead_attention(Q, K, V, W_Q, W_K, W_V, W_O, mask)


def init_multihead_weights(
    key: Any, d_model: int, num_heads: int, d_k: int | None = None, d_v: int | None = None
) -> dict[str, Array]:
    r"""Draw Glorot-normal projections W_Q, W_K, W_V and W_O, with variance $2/(fan_{in} + fan_{out})$.

    The projection of a head has fans d_model and d_k (or d_v); the output projection, which reads all heads, has fans
    H d_v and d_model. `key` is a NumPy or PyTorch `Generator` or a JAX key; the weights are of its library. The widths
    of a head, d_k for queries and keys and d_v for values, are d_model / num_heads by default.
    """
    require_count(1, d_model=d_model, num_heads=num_heads)
    if (d_k is None or d_v is None) and d_model % num_heads:
        hint = "Or give both d_k and d_v, the widths of a head."
        raise InputError("num_heads", expected=f"a divisor of d_model = {d_model}", got=num_heads, hint=hint)
    d_k = d_model // num_heads if d_k is None else d_k
    d_v = d_model // num_heads if d_v is None else d_v
    require_count(1, d_k=d_k, d_v=d_v)
    shapes_and_fans = {
        "W_Q": ((num_heads, d_model, d_k), d_model + d_k),
        "W_K": ((num_heads, d_model, d_k), d_model + d_k),
        "W_V": ((num_heads, d_model, d_v), d_model + d_v),
        "W_O": ((num_heads, d_v, d_model), num_heads * d_v + d_model),
    }
    keys = split(key, len(shapes_and_fans))
    return {
        name: normal(own, shape) * math.sqrt(2 / fans)
        for own, (name, (shape, fans)) in zip(keys, shapes_and_fans.items(), strict=True)
    }


def head_diversity(A: Array) -> Array:
    r"""Return one minus the mean cosine similarity over all pairs of heads' weights, each flattened, (...).

    0 for identical heads or a single head, 1 for heads that never weigh the same key for the same query. Heads of zeros
    count as identical to each other and orthogonal to all others.
    """
    xp, A = check_arrays(A=(A, "..., head, query, key"))
    *batch, num_heads, num_queries, num_keys = A.shape
    heads = xp.reshape(accumulate(A), (*batch, num_heads, num_queries * num_keys))
    squares = xp.sum(heads**2, axis=-1, keepdims=True)
    blank = squares == 0
    directions = heads / xp.sqrt(xp.where(blank, 1.0, squares))
    num_blank = xp.sum(xp.astype(blank, heads.dtype), axis=(-2, -1))
    # The squared length of the sum of unit vectors counts each pair twice and each head once.
    similarity = xp.sum(xp.sum(directions, axis=-2) ** 2, axis=-1) + num_blank**2
    return xp.astype((num_heads**2 - similarity) / max(num_heads * (num_heads - 1), 1), A.dtype)


def head_attention_entropy(A: Array) -> Array:
    """Return the mean over queries of the entropy of each head's weights in nats, (..., H); 0 for masked queries."""
    xp, A = unify(A=A)
    require_rank("..., head, query, key", A=A)
    return xp.mean(attention_entropy(A), axis=-1)


def decompose_multihead(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array
) -> dict[str, Array]:
    """Return every step of multi-head attention by name.

    Returns:
        Q_heads (..., H, query, d_k), K_heads (..., H, key, d_k), V_heads (..., H, key, d_v); scores and weights
        (..., H, query, key); head_outputs (..., H, query, d_v), before W_O; output (..., query, d_model);
        head_diversity (...); head_entropy (..., H)
    """
    steps = _attend(Q, K, V, W_Q, W_K, W_V, W_O, None)
    weights = steps["weights"]
    return {**steps, "head_diversity": head_diversity(weights), "head_entropy": head_attention_entropy(weights)}


def _attend(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mask: Array | None
) -> dict[str, Array]:
    _, Q, K, V, W_Q, W_K, W_V, W_O, mask = unify(Q=Q, K=K, V=V, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O, mask=mask)
    # Q, K and V may have different widths; their projections must not.
    xp, *_ = check_arrays(
        Q=(Q, "..., query, d_model"),
        K=(K, "..., key, d_model of K"),
        V=(V, "..., key, d_model of V"),
        W_Q=(W_Q, "head, d_model, d_k"),
        W_K=(W_K, "head, d_model of K, d_k"),
        W_V=(W_V, "head, d_model of V, d_v"),
        W_O=(W_O, "head, d_v, d_model of the output"),
    )
    # (..., position, d_model) and (H, d_model, width) → (..., H, position, width)
    queries, keys, values = (xp.matmul(X[..., None, :, :], W) for X, W in ((Q, W_Q), (K, W_K), (V, W_V)))
    scores = attention_scores(queries, keys)
    require_head_mask(mask, tuple(scores.shape))
    weights = attention_weights(scores, mask)
    outputs = attention_output(weights, values)
    return {
        "Q_heads": queries,
        "K_heads": keys,
        "V_heads": values,
        "scores": scores,
        "weights": weights,
        "head_outputs": outputs,
        "output": xp.sum(xp.matmul(outputs, W_O), axis=-3),
    }
