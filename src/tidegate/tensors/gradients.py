r"""Backward passes of attention and of Bilinearly Modulated Attention, derived by hand, and their checkers.

`dL_dX` is the gradient of a loss L with respect to X and has X's shape. Shapes are Q (..., query, h), K (..., key, h),
V (..., key, value width), A and S (..., query, key), W_g (..., h, value width) and dL_dO (..., query, value width).
Checkers use the loss $L = \frac12 \sum O^2$, whose gradient with respect to the output is the output itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tidegate.tensors._checks import check_arrays, require_floating, require_same_shape
from tidegate.tensors.activations import activate, activation_slope
from tidegate.tensors.attention import (
    attention_output,
    attention_scores,
    attention_weights,
    scaled_dot_product_attention,
)
from tidegate.tensors.autodiff import central_differences, gradients
from tidegate.tensors.gating import bilinearly_modulated_attention
from tidegate.tensors.namespace import Array, namespace_of, sum_to_shape, unify


def grad_scores_wrt_Q(dL_dS: Array, K: Array, scale: float) -> Array:
    r"""Return $dL/dQ = s\,(dL/dS)\,K$, from $S = s\,Q K^T$."""
    xp, dL_dS, K = check_arrays(dL_dS=(dL_dS, "..., query, key"), K=(K, "..., key, width"))
    return xp.matmul(dL_dS, K) * scale


def grad_scores_wrt_K(dL_dS: Array, Q: Array, scale: float) -> Array:
    r"""Return $dL/dK = s\,(dL/dS)^T Q$, from $S = s\,Q K^T$."""
    xp, dL_dS, Q = check_arrays(dL_dS=(dL_dS, "..., query, key"), Q=(Q, "..., query, width"))
    return xp.matmul(xp.moveaxis(dL_dS, -1, -2), Q) * scale


def grad_softmax(dL_dA: Array, A: Array) -> Array:
    r"""Return $dL/dS_{ij} = A_{ij} (dL/dA_{ij} - \sum_k A_{ik}\,dL/dA_{ik})$, from $A = \mathrm{softmax}(S)$.

    A row of zeros, from a fully masked query, has gradient 0.
    """
    xp, dL_dA, A = unify(dL_dA=dL_dA, A=A)
    require_floating(dL_dA=dL_dA, A=A)
    require_same_shape(A=A, dL_dA=dL_dA)
    return A * (dL_dA - xp.sum(A * dL_dA, axis=-1, keepdims=True))


def grad_output_wrt_A(dL_dO: Array, V: Array) -> Array:
    r"""Return $dL/dA = (dL/dO)\,V^T$, from $O = A V$."""
    xp, dL_dO, V = check_arrays(dL_dO=(dL_dO, "..., query, value width"), V=(V, "..., key, value width"))
    return xp.matmul(dL_dO, xp.moveaxis(V, -1, -2))


def grad_output_wrt_V(dL_dO: Array, A: Array) -> Array:
    r"""Return $dL/dV = A^T\,dL/dO$, from $O = A V$."""
    xp, dL_dO, A = check_arrays(dL_dO=(dL_dO, "..., query, value width"), A=(A, "..., query, key"))
    return xp.matmul(xp.moveaxis(A, -1, -2), dL_dO)


def attention_backward(dL_dO: Array, Q: Array, K: Array, V: Array, A: Array, S: Array) -> tuple[Array, Array, Array]:
    r"""Return the gradients of $O = \mathrm{softmax}(Q K^T / \sqrt h)\,V$ for Q, K and V.

    The softmax's derivative depends only on the weights A; only the shape of the scores S is used, for a check. Masked
    pairs have A = 0 and so gradient 0. Gradients are summed over broadcast leading axes.
    """
    _, dL_dO, Q, K, V, A, S = unify(dL_dO=dL_dO, Q=Q, K=K, V=V, A=A, S=S)
    require_same_shape(A=A, S=S)
    scale = Q.shape[-1] ** -0.5
    dL_dS = grad_softmax(grad_output_wrt_A(dL_dO, V), A)
    return (
        sum_to_shape(grad_scores_wrt_Q(dL_dS, K, scale), tuple(Q.shape)),
        sum_to_shape(grad_scores_wrt_K(dL_dS, Q, scale), tuple(K.shape)),
        sum_to_shape(grad_output_wrt_V(dL_dO, A), tuple(V.shape)),
    )


def bma_backward(
    dL_dO: Array,
    Q: Array,
    K: Array,
    V: Array,
    W_g: Array,
    *,
    index: Literal["source", "query"] = "source",
    mask: Array | None = None,
) -> dict[str, Array]:
    r"""Return the gradients of `bilinearly_modulated_attention`, with $P = Q W_g$ and $G = \sigma(P)$.

    `source`, $O = A (G \odot V)$, $\tilde V = G \odot V$: $dL/d\tilde V = A^T E$, $dL/dV = G \odot dL/d\tilde V$ and
    $dL/dP = V \odot dL/d\tilde V \odot G \odot (1 - G)$. `query`, $O = G \odot A V$: attention receives
    $G \odot E$ and $dL/dP = A V \odot E \odot G \odot (1 - G)$. Either way $dL/dW_g = Q^T dL/dP$, and Q gains
    $dL/dP\,W_g^T$ beside its path through the scores.

    Returns:
        dL_dQ, dL_dK, dL_dV, dL_dW_g, each of its argument's shape (summed over axes that were broadcast)
    """
    xp, dL_dO, Q, K, V, W_g, mask = unify(dL_dO=dL_dO, Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    require_floating(dL_dO=dL_dO)
    gated = bilinearly_modulated_attention(Q, K, V, W_g, index=index, mask=mask)
    require_same_shape(output=gated, dL_dO=dL_dO)
    scores = attention_scores(Q, K)
    weights = attention_weights(scores, mask)
    logits = xp.matmul(Q, W_g)
    gate = activate("sigmoid", logits)
    if index == "source":
        dL_dQ, dL_dK, dL_dgated = attention_backward(dL_dO, Q, K, gate * V, weights, scores)
        dL_dV, dL_dgate = sum_to_shape(gate * dL_dgated, tuple(V.shape)), V * dL_dgated
    else:
        dL_dQ, dL_dK, dL_dV = attention_backward(gate * dL_dO, Q, K, V, weights, scores)
        dL_dgate = attention_output(weights, V) * dL_dO
    dL_dP = dL_dgate * activation_slope("sigmoid", logits)
    return {
        "dL_dQ": dL_dQ + sum_to_shape(xp.matmul(dL_dP, xp.moveaxis(W_g, -1, -2)), tuple(Q.shape)),
        "dL_dK": dL_dK,
        "dL_dV": dL_dV,
        "dL_dW_g": sum_to_shape(xp.matmul(xp.moveaxis(Q, -1, -2), dL_dP), tuple(W_g.shape)),
    }


def verify_gradients(
    Q: Array,
    K: Array,
    V: Array,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    *,
    W_g: Array | None = None,
    index: Literal["source", "query"] = "source",
    mask: Array | None = None,
) -> dict[str, bool]:
    """Compare the hand-derived gradients with the library's own, in a dict of dL_dQ, dL_dK, dL_dV and all_correct.

    With `W_g` they are those of bilinearly modulated attention, with dL_dW_g. The reference is automatic
    differentiation for JAX and PyTorch arrays, central differences for NumPy arrays.
    """
    arrays, loss = _loss(Q, K, V, W_g, index, mask)
    return gradients_agree(_analytic(arrays, index, mask), gradients(loss, arrays), rtol=rtol, atol=atol)


def gradients_agree(
    analytic: Mapping[str, Array], judged_by: Mapping[str, Array], *, rtol: float = 1e-5, atol: float = 1e-5
) -> dict[str, bool]:
    """Return for each `dL_d<name>` whether |difference| ≤ atol + rtol |judge| everywhere, and all_correct."""
    verdicts: dict[str, bool] = {}
    for name, judge in judged_by.items():
        xp = namespace_of(judge)
        difference = xp.abs(analytic[f"dL_d{name}"] - judge)
        verdicts[f"dL_d{name}"] = bool(xp.all(difference <= atol + rtol * xp.abs(judge)))
    return {**verdicts, "all_correct": all(verdicts.values())}


def gradient_numerical_check(
    Q: Array,
    K: Array,
    V: Array,
    eps: float = 1e-5,
    *,
    W_g: Array | None = None,
    index: Literal["source", "query"] = "source",
    mask: Array | None = None,
) -> dict[str, Any]:
    """Compare hand-derived gradients with central differences of step eps; use small float64 arrays.

    Returns:
        numerical and analytic, dictionaries dL_d* → array; max_error, their largest difference; and rel_error,
        max_error over the largest numerical entry
    """
    arrays, loss = _loss(Q, K, V, W_g, index, mask)
    numerical = {f"dL_d{name}": slope for name, slope in central_differences(loss, arrays, eps=eps).items()}
    analytic = _analytic(arrays, index, mask)
    xp = namespace_of(*arrays.values())
    max_error = max(float(xp.max(xp.abs(analytic[name] - numerical[name]))) for name in numerical)
    largest = max(float(xp.max(xp.abs(slope))) for slope in numerical.values())
    return {
        "numerical": numerical,
        "analytic": analytic,
        "max_error": max_error,
        "rel_error": max_error / largest if largest > 0 else max_error,
    }


def gradient_flow_analysis(Q: Array, K: Array, V: Array) -> dict[str, Any]:
    """Return the intermediates of plain attention, their gradients, and the gradients' Frobenius norms.

    Returns:
        S, A, O, dL_dO, dL_dA, dL_dS, dL_dQ, dL_dK, dL_dV, and grad_norms by name
    """
    xp, Q, K, V = unify(Q=Q, K=K, V=V)
    S = attention_scores(Q, K)
    A = attention_weights(S)
    O = attention_output(A, V)  # noqa: E741
    dL_dA = grad_output_wrt_A(O, V)
    dL_dQ, dL_dK, dL_dV = attention_backward(O, Q, K, V, A, S)
    flow = {"dL_dO": O, "dL_dA": dL_dA, "dL_dS": grad_softmax(dL_dA, A), "dL_dQ": dL_dQ, "dL_dK": dL_dK, "dL_dV": dL_dV}
    norms = {name: xp.sqrt(xp.sum(gradient * gradient)) for name, gradient in flow.items()}
    return {"S": S, "A": A, "O": O, **flow, "grad_norms": norms}


def _loss(Q: Array, K: Array, V: Array, W_g: Array | None, index: Literal["source", "query"], mask: Array | None):
    """Return the arrays that the gradients are for, and half the sum of squares of the output as a function of them."""
    xp, Q, K, V, W_g, mask = unify(Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    arrays: dict[str, Array] = {"Q": Q, "K": K, "V": V} | ({} if W_g is None else {"W_g": W_g})

    def loss(named: Mapping[str, Array]) -> Array:
        if W_g is None:
            output = scaled_dot_product_attention(named["Q"], named["K"], named["V"], mask)
        else:
            output = bilinearly_modulated_attention(**named, index=index, mask=mask)
        return xp.sum(output * output) / 2

    return arrays, loss


def _analytic(arrays: Mapping[str, Array], index: Literal["source", "query"], mask: Array | None) -> dict[str, Array]:
    if "W_g" in arrays:
        output = bilinearly_modulated_attention(**arrays, index=index, mask=mask)
        return bma_backward(output, **arrays, index=index, mask=mask)
    scores = attention_scores(arrays["Q"], arrays["K"])
    weights = attention_weights(scores, mask)
    output = attention_output(weights, arrays["V"])
    names = ("dL_dQ", "dL_dK", "dL_dV")
    return dict(zip(names, attention_backward(output, **arrays, A=weights, S=scores), strict=True))
