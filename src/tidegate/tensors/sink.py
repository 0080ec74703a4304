r"""A sink: an additional state of the softmax with a logit $s$ and no value.

$$y_i = \frac{\sum_j e^{S_{ij}} v_j}{Z_i + e^s} = \sigma(L_i - s)\; o_i, \qquad L_i = \log Z_i,$$

so that a sink is a gate on the attention output that reads the logarithm of the partition function, with bias $-s$.
Softmax-off-by-one is $s = 0$. A fully masked query has all its weight on the sink, and output 0.
"""

from __future__ import annotations

from tidegate.tensors._checks import require_floating, require_same_shape
from tidegate.tensors.activations import activate
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.gradients import attention_backward
from tidegate.tensors.namespace import Array, sum_to_shape, unify
from tidegate.tensors.softmax import log_partition


def sink_attention(Q: Array, K: Array, V: Array, sink: Array, mask: Array | None = None) -> Array:
    r"""Return attention with a sink by definition: a softmax over the scores and one more column, which is dropped.

    Args:
        Q: (..., T, h), with heads (..., H, T, h)
        K: (..., S, h)
        V: (..., S, value width)
        sink: (), with heads (H,): the logit $s$
        mask: bool, broadcasts to (..., T, S), True = may attend; a fully masked row gives 0

    Returns:
        (..., T, value width)
    """
    xp, Q, K, V, sink, mask = unify(Q=Q, K=K, V=V, sink=sink, mask=mask)
    require_floating(sink=sink)
    scores = attention_scores(Q, K)
    column = xp.broadcast_to(xp.astype(sink, scores.dtype)[..., None, None], (*scores.shape[:-1], 1))
    extended = xp.concat([scores, column], axis=-1)
    if mask is not None:
        allowed = xp.broadcast_to(mask, scores.shape)
        mask = xp.concat([allowed, xp.ones_like(allowed[..., :1])], axis=-1)
    return attention_output(attention_weights(extended, mask)[..., :-1], V)


def sink_mass(log_partition: Array, sink: Array) -> Array:
    r"""Return the weight on the sink, $e^s / (Z + e^s) = \sigma(s - L)$; 1 for an empty row.

    Args:
        log_partition: (..., T), with heads (..., H, T); -inf stands for an empty row
        sink: (), with heads (H,)
    """
    xp, log_partition, sink = _unify_logits(log_partition, sink)
    return xp.astype(activate("sigmoid", sink - log_partition), log_partition.dtype)


def log_partition_with_sink(log_partition: Array, sink: Array) -> Array:
    r"""Return the logarithm of the partition function including the sink, $\log(Z + e^s)$; s for an empty row."""
    xp, log_partition, sink = _unify_logits(log_partition, sink)
    return xp.logaddexp(log_partition, xp.broadcast_to(sink, log_partition.shape))


def entropy_with_sink(entropy: Array, mass: Array) -> Array:
    r"""Return the entropy of keys and sink together, $(1 - p) S - p \log p - (1 - p) \log (1 - p)$, in nats.

    Args:
        entropy: (..., T), of the weights without the sink
        mass: Like entropy; $p$, the weight on the sink
    """
    xp, entropy, mass = unify(entropy=entropy, mass=mass)
    require_floating(entropy=entropy, mass=mass)
    require_same_shape(entropy=entropy, mass=mass)
    terms = (-share * xp.log(xp.where(share > 0, share, 1.0)) for share in (mass, 1 - mass))
    return (1 - mass) * entropy + sum(terms)


def sink_backward(
    dL_dO: Array, Q: Array, K: Array, V: Array, sink: Array, *, mask: Array | None = None
) -> dict[str, Array]:
    r"""Return the gradients of `sink_attention`: those of plain attention with the weights $\exp(S - l')$.

    With $l' = \log(Z + e^s)$ these sum to 1 less the mass on the sink, and
    $\sum_j A'_{ij} (E_i \cdot v_j) = E_i \cdot y_i$, as the softmax's backward pass requires. The sink has
    $dL/ds = -\sum_i e^{s - l'_i} (E_i \cdot y_i)$. `dL_dO` is E, (..., T, value width).

    Returns:
        dL_dQ, dL_dK, dL_dV, dL_dsink, each of its argument's shape (summed over axes that were broadcast)
    """
    xp, dL_dO, Q, K, V, sink, mask = unify(dL_dO=dL_dO, Q=Q, K=K, V=V, sink=sink, mask=mask)
    scores = attention_scores(Q, K)
    mass = sink_mass(log_partition(scores, mask=mask), sink)
    weights = attention_weights(scores, mask) * (1 - mass)[..., None]
    dL_dQ, dL_dK, dL_dV = attention_backward(dL_dO, Q, K, V, weights, scores)
    dL_dsink = -xp.sum(mass * xp.sum(dL_dO * attention_output(weights, V), axis=-1), axis=-1)
    return {"dL_dQ": dL_dQ, "dL_dK": dL_dK, "dL_dV": dL_dV, "dL_dsink": sum_to_shape(dL_dsink, tuple(sink.shape))}


def _unify_logits(log_partition: Array, sink: Array) -> tuple[Array, Array, Array]:
    """Return the namespace, the log-partition, and the sink with an axis for positions."""
    xp, log_partition, sink = unify(log_partition=log_partition, sink=sink)
    require_floating(log_partition=log_partition, sink=sink)
    return xp, log_partition, sink[..., None]
