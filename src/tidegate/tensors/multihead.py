"""Multi-head attention: heads split, attended to and merged; how much they differ and how widely they look.

Inputs are `(..., position, d_model)`, projections `(H, d_model, d_k)`, heads `(..., H, position, d_k)` and weights
`(..., H, query, key)`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tidegate.tensors._checks import (
    require_batches_broadcast,
    require_count,
    require_equal,
    require_floating,
    require_head_mask,
    require_rank,
)
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.namespace import accumulate, unify
from tidegate.tensors.random import normal, split
from tidegate.tensors.softmax import attention_entropy

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array, Namespace

__all__ = [
    "decompose_multihead",
    "head_attention_entropy",
    "head_diversity",
    "init_multihead_weights",
    "multihead_attention",
    "multihead_attention_batched",
]


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
    r"""Multi-head attention, $Y = \sum_h \mathrm{softmax}(Q_h K_h^\top / \sqrt{d_k})\, V_h W_O^h$ with $Q_h = Q W_Q^h$.

    Q        : (..., query, d_model) inputs, to be projected
    K, V     : (..., key, d_model) inputs, to be projected
    W_Q, W_K : (H, d_model, d_k)
    W_V      : (H, d_model, d_v)
    W_O      : (H, d_v, d_model)
    mask     : bool, True where a query may attend: (query, key) for all heads and batches alike, or with every axis of
               the weights, any of size 1, so that a mask for each batch is (..., 1, query, key)
    returns  : (..., query, d_model); with `return_weights` also the weights (..., H, query, key)
    """
    steps = _attend(Q, K, V, W_Q, W_K, W_V, W_O, mask)
    return (steps["output"], steps["weights"]) if return_weights else steps["output"]


def multihead_attention_batched(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mask: Array | None = None
) -> Array:
    """`multihead_attention` where each of Q, K and V has at least one batch axis.

    Q        : (..., batch, query, d_model) inputs, to be projected
    K, V     : (..., batch, key, d_model) inputs, to be projected
    W_Q, W_K : (H, d_model, d_k)
    W_V      : (H, d_model, d_v)
    W_O      : (H, d_v, d_model)
    mask     : bool, True where a query may attend: (query, key), or with every axis of the weights, any of size 1
    returns  : (..., batch, query, d_model)
    """
    _, Q, K, V = unify(Q=Q, K=K, V=V)
    require_rank("batch, query, d_model", Q=Q)
    require_rank("batch, key, d_model", K=K, V=V)
    return multihead_attention(Q, K, V, W_Q, W_K, W_V, W_O, mask)


def init_multihead_weights(
    key: Any, d_model: int, num_heads: int, d_k: int | None = None, d_v: int | None = None
) -> dict[str, Array]:
    r"""Glorot-normal projections, drawn with variance $2/(fan_{in} + fan_{out})$.

    Each head's own projection has fans d_model and d_k (or d_v); the output projection, which reads all heads side by
    side, has fans H d_v and d_model.

    key      : a NumPy or PyTorch `Generator` or a JAX key; the weights are of its kind
    d_k, d_v : widths of a head; None is d_model / num_heads, which must divide
    returns  : W_Q and W_K (H, d_model, d_k), W_V (H, d_model, d_v), W_O (H, d_v, d_model), by name
    """
    require_count(1, d_model=d_model, num_heads=num_heads)
    if (d_k is None or d_v is None) and d_model % num_heads:
        raise ValueError(
            f"num_heads must divide d_model; got num_heads {num_heads} and d_model {d_model}. "
            "Or give both d_k and d_v, the widths of a head."
        )
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
    r"""How much heads differ: one minus the mean cosine similarity over all pairs of heads' weights, each flattened.

    0 for identical heads, 1 for heads that never weigh the same key for the same query. A single head has diversity 0.
    A head without any weight is identical to another such head, and orthogonal to every other one.

    A       : (..., H, query, key)
    returns : (...)
    """
    xp, A = unify(A=A)
    require_floating(A=A)
    require_rank("head, query, key", A=A)
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
    """Mean over queries of the entropy of a head's weights, in nats; a query that sees nothing counts as 0.

    A       : (..., H, query, key)
    returns : (..., H)
    """
    xp, A = unify(A=A)
    require_rank("head, query, key", A=A)
    return xp.mean(attention_entropy(A), axis=-1)


def decompose_multihead(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array
) -> dict[str, Array]:
    """Every step of multi-head attention by name.

    Arguments as for `multihead_attention`.

    returns : Q_heads (..., H, query, d_k), K_heads (..., H, key, d_k), V_heads (..., H, key, d_v); scores and weights
              (..., H, query, key); head_outputs (..., H, query, d_v), before W_O; output (..., query, d_model);
              head_diversity (...); head_entropy (..., H)
    """
    steps = _attend(Q, K, V, W_Q, W_K, W_V, W_O, None)
    weights = steps["weights"]
    return {**steps, "head_diversity": head_diversity(weights), "head_entropy": head_attention_entropy(weights)}


def _attend(
    Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mask: Array | None
) -> dict[str, Array]:
    xp, Q, K, V, W_Q, W_K, W_V, W_O, mask = unify(Q=Q, K=K, V=V, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O, mask=mask)
    _require_inputs(Q, K, V, W_Q, W_K, W_V, W_O)
    queries, keys, values = _project(xp, Q, W_Q), _project(xp, K, W_K), _project(xp, V, W_V)
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


def _project(xp: Namespace, X: Array, W: Array) -> Array:
    """(..., position, d_model) and (H, d_model, width) → (..., H, position, width)."""
    return xp.matmul(X[..., None, :, :], W)


def _require_inputs(Q: Array, K: Array, V: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array) -> None:
    require_floating(Q=Q, K=K, V=V, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O)
    require_rank("query, d_model", Q=Q)
    require_rank("key, d_model", K=K, V=V)
    require_rank("head, d_model, d_k", exact=True, W_Q=W_Q, W_K=W_K)
    require_rank("head, d_model, d_v", exact=True, W_V=W_V)
    require_rank("head, d_v, d_model", exact=True, W_O=W_O)
    require_equal("number of heads", W_Q=W_Q.shape[0], W_K=W_K.shape[0], W_V=W_V.shape[0], W_O=W_O.shape[0])
    require_equal("d_k", W_Q=W_Q.shape[-1], W_K=W_K.shape[-1])
    require_equal("d_v", W_V=W_V.shape[-1], W_O=W_O.shape[-2])
    require_equal("d_model", Q=Q.shape[-1], W_Q=W_Q.shape[-2])
    require_equal("d_model", K=K.shape[-1], W_K=W_K.shape[-2])
    require_equal("d_model", V=V.shape[-1], W_V=W_V.shape[-2])
    require_equal("number of keys", K=K.shape[-2], V=V.shape[-2])
    require_batches_broadcast(2, Q=Q, K=K, V=V)
