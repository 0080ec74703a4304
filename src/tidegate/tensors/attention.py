"""Attention for one head: scores, then weights, then output; with any metric, and decomposed on request.

Queries are `(..., query, width)`, keys `(..., key, width)`, values `(..., key, value width)`, weights
`(..., query, key)`; the leading axes broadcast. A query that may see nothing gets weights 0 and output 0, with
gradient 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tidegate.tensors._checks import (
    require_batches_broadcast,
    require_equal,
    require_floating,
    require_mask,
    require_rank,
)
from tidegate.tensors.bilinear import bilinear_form_batch
from tidegate.tensors.namespace import unify
from tidegate.tensors.softmax import gibbs_distribution, partition_function

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array

__all__ = [
    "attention_output",
    "attention_scores",
    "attention_scores_with_metric",
    "attention_weights",
    "batched_attention",
    "bilinear_attention",
    "decompose_attention",
    "scaled_dot_product_attention",
]


def attention_scores(Q: Array, K: Array, scale: bool = True) -> Array:
    r"""Scores $S_{ij} = q_i \cdot k_j / \sqrt{width}$, or without the root if `scale` is False.

    Q       : (..., query, width)
    K       : (..., key, width)
    returns : (..., query, key)
    """
    if scale not in (True, False):
        raise TypeError(f"scale must be True, for 1/sqrt(width), or False, for 1; got {scale!r}. Multiply the scores.")
    xp, Q, K = unify(Q=Q, K=K)
    require_floating(Q=Q, K=K)
    require_rank("query, width", Q=Q)
    require_rank("key, width", K=K)
    require_equal("width", Q=Q.shape[-1], K=K.shape[-1])
    require_batches_broadcast(2, Q=Q, K=K)
    raw = xp.matmul(Q, xp.matrix_transpose(K))
    return raw * _scale(Q) if scale else raw


def attention_scores_with_metric(Q: Array, K: Array, g: Array) -> Array:
    r"""Scores under a metric, $S_{ij} = q_i^a g_{ab} k_j^b$; nothing else is scaled.

    Q       : (..., query, width)
    K       : (..., key, width)
    g       : (width, width)
    returns : (..., query, key)
    """
    return bilinear_form_batch(Q, K, g)


def attention_weights(S: Array, mask: Array | None = None, temperature: Array | float = 1.0) -> Array:
    r"""Weights $A_{ij} = \exp(S_{ij}/T)/Z_i$ over the keys that query i may see.

    S           : (..., query, key); a score of -inf counts as masked
    mask        : bool, broadcasts to S, True where a query may attend
    temperature : above 0; a number, or an array that broadcasts to one for each query, (..., query, 1)
    returns     : (..., query, key); each row sums to 1, or to 0 if it may see nothing
    """
    _, S, mask = unify(S=S, mask=mask)
    require_floating(S=S)
    require_rank("query, key", S=S)
    require_mask(mask, tuple(S.shape))
    return gibbs_distribution(S, temperature, mask)


def attention_output(A: Array, V: Array) -> Array:
    r"""Aggregation $o_i = \sum_j A_{ij} v_j$.

    A       : (..., query, key)
    V       : (..., key, value width)
    returns : (..., query, value width)
    """
    xp, A, V = unify(A=A, V=V)
    require_floating(A=A, V=V)
    require_rank("query, key", A=A)
    require_rank("key, value width", V=V)
    require_equal("number of keys", A=A.shape[-1], V=V.shape[-2])
    require_batches_broadcast(2, A=A, V=V)
    return xp.matmul(A, V)


def scaled_dot_product_attention(
    Q: Array,
    K: Array,
    V: Array,
    mask: Array | None = None,
    temperature: Array | float = 1.0,
    return_weights: bool = False,
) -> Any:
    r"""Attention $O = \mathrm{softmax}(Q K^\top / (T \sqrt{width}))\, V$.

    Q           : (..., query, width)
    K           : (..., key, width)
    V           : (..., key, value width)
    mask        : bool, broadcasts to the scores (..., query, key), True where a query may attend
    temperature : above 0; a number, or an array that broadcasts to one for each query, (..., query, 1)
    returns     : (..., query, value width); with `return_weights` also the weights (..., query, key)
    """
    _, Q, K, V, mask = unify(Q=Q, K=K, V=V, mask=mask)
    return _attend(attention_scores(Q, K), V, mask, temperature, return_weights)


def bilinear_attention(
    Q: Array,
    K: Array,
    V: Array,
    g: Array,
    mask: Array | None = None,
    temperature: Array | float = 1.0,
    return_weights: bool = False,
) -> Any:
    r"""Attention under a metric, $O = \mathrm{softmax}(Q g K^\top / T)\, V$; the metric holds the scale.

    Q           : (..., query, width)
    K           : (..., key, width)
    V           : (..., key, value width)
    g           : (width, width)
    mask        : bool, broadcasts to the scores (..., query, key), True where a query may attend
    temperature : above 0; a number, or an array that broadcasts to one for each query, (..., query, 1)
    returns     : (..., query, value width); with `return_weights` also the weights (..., query, key)
    """
    _, Q, K, V, g, mask = unify(Q=Q, K=K, V=V, g=g, mask=mask)
    return _attend(attention_scores_with_metric(Q, K, g), V, mask, temperature, return_weights)


def batched_attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
    """`scaled_dot_product_attention` where each of Q, K and V has at least one batch axis.

    Q       : (..., batch, query, width)
    K       : (..., batch, key, width)
    V       : (..., batch, key, value width)
    mask    : bool, broadcasts to the scores (..., batch, query, key), True where a query may attend
    returns : (..., batch, query, value width)
    """
    _, Q, K, V, mask = unify(Q=Q, K=K, V=V, mask=mask)
    require_rank("batch, query, width", Q=Q)
    require_rank("batch, key, width", K=K)
    require_rank("batch, key, value width", V=V)
    return scaled_dot_product_attention(Q, K, V, mask)


def decompose_attention(Q: Array, K: Array, V: Array) -> dict[str, Any]:
    r"""Every step of scaled dot-product attention by name.

    Q       : (..., query, width)
    K       : (..., key, width)
    V       : (..., key, value width)
    returns : scores_raw $q_i \cdot k_j$, scores and weights (..., query, key); partition $Z_i$ (..., query);
              output (..., query, value width); scale, the number $1/\sqrt{width}$
    """
    _, Q, K, V = unify(Q=Q, K=K, V=V)
    raw = attention_scores(Q, K, scale=False)
    scores = raw * _scale(Q)
    weights = attention_weights(scores)
    return {
        "scores_raw": raw,
        "scores": scores,
        "weights": weights,
        "output": attention_output(weights, V),
        "partition": partition_function(scores),
        "scale": _scale(Q),
    }


def _scale(Q: Array) -> float:
    # Vectors without entries have score 0 at any scale.
    return 1 / math.sqrt(max(Q.shape[-1], 1))


def _attend(S: Array, V: Array, mask: Array | None, temperature: Array | float, return_weights: bool) -> Any:
    weights = attention_weights(S, mask, temperature)
    output = attention_output(weights, V)
    return (output, weights) if return_weights else output
