"""Attention for one head: scores, weights and output, under any metric.

Queries are `(..., query, width)`, keys `(..., key, width)`, values `(..., key, value width)`, scores and weights
`(..., query, key)`; the leading axes broadcast. A mask is bool, broadcasts to the scores, and is True where a query may
attend. A fully masked query has weights 0 and output 0, with gradient 0. A temperature is above 0: a number, or an
array that broadcasts to one for each query, `(..., query, 1)`.
"""

from __future__ import annotations

import math
from typing import Any

from tidegate.tensors._checks import check_arrays, require_floating, require_mask, require_rank
from tidegate.tensors.bilinear import bilinear_form_batch
from tidegate.tensors.namespace import Array, unify
from tidegate.tensors.softmax import gibbs_distribution, partition_function


def attention_scores(Q: Array, K: Array, scale: bool = True) -> Array:
    r"""Return scores $S_{ij} = q_i \cdot k_j / \sqrt{width}$, or without the root if `scale` is False."""
    if scale not in (True, False):
        raise TypeError(f"scale must be True, for 1/sqrt(width), or False, for 1, got {scale!r}. Multiply the scores.")
    xp, Q, K = check_arrays(Q=(Q, "..., query, width"), K=(K, "..., key, width"))
    raw = xp.matmul(Q, xp.matrix_transpose(K))
    return raw * _scale(Q) if scale else raw


def attention_scores_with_metric(Q: Array, K: Array, g: Array) -> Array:
    r"""Return scores under a metric g (width, width), $S_{ij} = q_i^a g_{ab} k_j^b$, without another scale."""
    return bilinear_form_batch(Q, K, g)


def attention_weights(S: Array, mask: Array | None = None, temperature: Array | float = 1.0) -> Array:
    r"""Return weights $A_{ij} = \exp(S_{ij}/T)/Z_i$ over the visible keys of query i; a score of -inf is masked."""
    _, S, mask = unify(S=S, mask=mask)
    require_floating(S=S)
    require_rank("..., query, key", S=S)
    require_mask(mask, tuple(S.shape))
    return gibbs_distribution(S, temperature, mask)


def attention_output(A: Array, V: Array) -> Array:
    r"""Return the aggregate $o_i = \sum_j A_{ij} v_j$, (..., query, value width)."""
    xp, A, V = check_arrays(A=(A, "..., query, key"), V=(V, "..., key, value width"))
    return xp.matmul(A, V)


def scaled_dot_product_attention(
    Q: Array,
    K: Array,
    V: Array,
    mask: Array | None = None,
    temperature: Array | float = 1.0,
    return_weights: bool = False,
) -> Any:
    r"""Return attention $O = \mathrm{softmax}(Q K^\top / (T \sqrt{width}))\, V$.

    With `return_weights` also the weights.
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
    r"""Return attention under a metric, $O = \mathrm{softmax}(Q g K^\top / T)\, V$; the metric includes the scale.

    With `return_weights` also the weights.
    """
    _, Q, K, V, g, mask = unify(Q=Q, K=K, V=V, g=g, mask=mask)
    return _attend(attention_scores_with_metric(Q, K, g), V, mask, temperature, return_weights)


def batched_attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
    """Return `scaled_dot_product_attention` where each of Q, K and V has at least one batch axis."""
    _, Q, K, V, mask = unify(Q=Q, K=K, V=V, mask=mask)
    require_rank("..., batch, query, width", Q=Q)
    require_rank("..., batch, key, width", K=K)
    require_rank("..., batch, key, value width", V=V)
    return scaled_dot_product_attention(Q, K, V, mask)


def decompose_attention(Q: Array, K: Array, V: Array) -> dict[str, Any]:
    r"""Return every step of scaled dot-product attention by name.

    Returns:
        scores_raw $q_i \cdot k_j$, scores and weights (..., query, key); partition $Z_i$ (..., query); output
        (..., query, value width); scale, the number $1/\sqrt{width}$
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
    # Vectors of width 0 have score 0 at any scale.
    return 1 / math.sqrt(max(Q.shape[-1], 1))


def _attend(S: Array, V: Array, mask: Array | None, temperature: Array | float, return_weights: bool) -> Any:
    weights = attention_weights(S, mask, temperature)
    output = attention_output(weights, V)
    return (output, weights) if return_weights else output
