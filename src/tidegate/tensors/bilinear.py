"""Metrics and what they measure: lowering and raising indices, bilinear and quadratic forms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tidegate.tensors._checks import (
    is_false,
    require_batches_broadcast,
    require_count,
    require_equal,
    require_floating,
    require_positive,
    require_rank,
)
from tidegate.tensors.namespace import accumulate, namespace_of, unify

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array, Namespace

__all__ = [
    "bilinear_form",
    "bilinear_form_batch",
    "diagonal_metric",
    "euclidean_metric",
    "inner_product",
    "learned_metric",
    "lower_index",
    "metric_inverse",
    "quadratic_form",
    "raise_index",
    "scaled_euclidean_metric",
    "verify_metric_properties",
]


def euclidean_metric(d: int, *, xp: Namespace = np) -> Array:
    r"""The Euclidean metric $g_{ab} = \delta_{ab}$.

    returns : (d, d), in the default floating dtype of `xp`
    """
    require_count(1, d=d)
    return xp.eye(d)


def scaled_euclidean_metric(d: int, scale: float | None = None, *, xp: Namespace = np) -> Array:
    r"""A multiple of the Euclidean metric, $g_{ab} = s\,\delta_{ab}$; attention's own has $s = 1/\sqrt{d}$.

    scale   : $s$, a single number above 0; None means $1/\sqrt{d}$
    returns : (d, d), in the default floating dtype of `xp`
    """
    if scale is None:
        return euclidean_metric(d, xp=xp) / math.sqrt(d)
    if getattr(scale, "ndim", 0) != 0:
        raise ValueError(f"scale must be a single number; got {scale!r}. For one number per axis use diagonal_metric.")
    require_positive(scale=scale)
    return euclidean_metric(d, xp=xp) * scale


def learned_metric(W: Array) -> Array:
    r"""The metric $g = W^\top W$ that a linear map pulls back from Euclidean space.

    Positive semidefinite for every W, and positive definite exactly when W has full column rank (so never for k < d).

    W       : (..., k, d)
    returns : (..., d, d)
    """
    xp, weight = unify(W=W)
    require_floating(W=weight)
    require_rank("k, d", W=weight)
    return xp.einsum("...ka,...kb->...ab", weight, weight)


def diagonal_metric(diag: Array) -> Array:
    r"""The metric $g_{ab} = w_a \delta_{ab}$ with one weight per axis.

    Positive definite exactly when all weights are above 0. Other weights are allowed, zeros give a singular metric.

    diag    : (..., d), the weights $w$
    returns : (..., d, d)
    """
    xp, diag = unify(diag=diag)
    require_floating(diag=diag)
    require_rank("d", diag=diag)
    rows = xp.broadcast_to(diag[..., None], (*diag.shape, diag.shape[-1]))
    return xp.tril(xp.triu(rows))


def lower_index(v_upper: Array, g: Array) -> Array:
    r"""The covector $v_a = g_{ab} v^b$ of a vector.

    v_upper : (..., d)
    g       : (..., d, d), symmetric
    returns : (..., d)
    """
    return _move_index(g, "g", v_upper=v_upper)


def raise_index(v_lower: Array, g_inv: Array) -> Array:
    r"""The vector $v^a = g^{ab} v_b$ of a covector; undoes `lower_index` when g_inv is `metric_inverse(g)`.

    v_lower : (..., d)
    g_inv   : (..., d, d), symmetric, the inverse of the metric
    returns : (..., d)
    """
    return _move_index(g_inv, "g_inv", v_lower=v_lower)


def metric_inverse(g: Array) -> Array:
    r"""The inverse metric $g^{ab}$ with $g^{ab} g_{bc} = \delta^a_c$, symmetric to the last bit.

    g may be indefinite. It is singular when its smallest |eigenvalue| is within d rounding errors of its largest; a
    singular or non-symmetric g is refused, unless its values are still being traced.

    g       : (..., d, d), symmetric
    returns : (..., d, d)
    """
    xp, g = unify(g=g)
    require_floating(g=g)
    _require_square(g=g)
    _require_symmetric(g=g)
    wide = accumulate(g)
    sizes = xp.abs(xp.linalg.eigvalsh(wide))
    rounding = g.shape[-1] * float(xp.finfo(wide.dtype).eps)
    if is_false(xp.min(sizes, axis=-1) > rounding * xp.max(sizes, axis=-1)):
        raise ValueError(
            f"g must be invertible; its smallest |eigenvalue| is {float(xp.min(sizes)):.3g}. "
            "Add a small multiple of euclidean_metric to it."
        )
    return xp.astype(_symmetric_part(xp, xp.linalg.inv(wide)), g.dtype, copy=False)


def bilinear_form(u: Array, v: Array, g: Array) -> Array:
    r"""The bilinear form $B(u, v) = u^a g_{ab} v^b$.

    Symmetric in u and v when g is. Any square g will do, such as $W_Q W_K^\top$.

    u, v    : (..., d)
    g       : (..., d, d)
    returns : (...)
    """
    xp, u, v, g = _admit(g, "g", "d", u=u, v=v)
    require_batches_broadcast(2, u=u[..., None], v=v[..., None], g=g)
    return xp.einsum("...a,...a->...", u, xp.einsum("...ab,...b->...a", g, v))


def bilinear_form_batch(Q: Array, K: Array, g: Array) -> Array:
    r"""The bilinear form of every query with every key, $S_{ij} = Q_{ia} g_{ab} K_{jb}$.

    Q       : (..., n, d)
    K       : (..., m, d)
    g       : (..., d, d), any square matrix
    returns : (..., n, m)
    """
    xp, queries, keys, g = _admit(g, "g", "position, d", Q=Q, K=K)
    require_batches_broadcast(2, Q=queries, K=keys, g=g)
    return xp.matmul(xp.matmul(queries, g), xp.matrix_transpose(keys))


def quadratic_form(v: Array, g: Array) -> Array:
    r"""The squared length $B(v, v) = v^a g_{ab} v^b$; negative values are possible unless g is positive semidefinite.

    v       : (..., d)
    g       : (..., d, d)
    returns : (...)
    """
    return bilinear_form(v, v, g)


def inner_product(u: Array, v: Array, metric_type: Literal["euclidean", "scaled"] = "scaled") -> Array:
    r"""The inner product in a metric known by name, without building the metric.

    "euclidean" is $u \cdot v$; "scaled" is $u \cdot v / \sqrt{d}$, the score of attention.

    u, v    : (..., d)
    returns : (...)
    """
    if metric_type not in ("euclidean", "scaled"):
        raise ValueError(f"metric_type must be 'euclidean' or 'scaled'; got {metric_type!r}.")
    xp, u, v = unify(u=u, v=v)
    require_floating(u=u, v=v)
    require_rank("d", u=u, v=v)
    require_equal("width", u=u.shape[-1], v=v.shape[-1])
    require_batches_broadcast(1, u=u, v=v)
    product = xp.einsum("...a,...a->...", u, v)
    return product / math.sqrt(u.shape[-1]) if metric_type == "scaled" else product


def verify_metric_properties(g: Array, tol: float = 1e-06) -> dict[str, Array]:
    r"""What makes g a metric, or not. The verdicts do not change when g is multiplied by a positive number.

    g       : (..., d, d)
    tol     : relative: to the largest |entry| for symmetry, to the largest |eigenvalue| for definiteness
    returns : a dict of arrays
        symmetric              : (...) bool
        positive_definite      : (...) bool, symmetric and every eigenvalue above tol; False for g = 0
        positive_semidefinite  : (...) bool, symmetric and no eigenvalue below -tol
        valid_metric           : (...) bool, what a metric must be: symmetric and positive definite
        eigenvalues            : (..., d), ascending, of the symmetric part of g; in float32 or better
        min_eigenvalue         : (...), the first of them
        condition_number       : (...), largest over smallest |eigenvalue|; inf if one is 0
        max_asymmetry          : (...), the largest $|g_{ab} - g_{ba}|$
    """
    xp, g = unify(g=g)
    require_floating(g=g)
    _require_square(g=g)
    _require_finite(g=g)
    if is_false(tol >= 0):
        raise ValueError(f"tol must be at least 0; got {tol!r}.")
    asymmetry = _asymmetry(xp, g)
    symmetric = asymmetry <= tol * _largest_entry(xp, g)
    eigenvalues = xp.linalg.eigvalsh(_symmetric_part(xp, accumulate(g)))
    sizes = xp.abs(eigenvalues)
    smallest, largest = xp.min(sizes, axis=-1), xp.max(sizes, axis=-1)
    regular = smallest > 0
    condition = largest / xp.where(regular, smallest, xp.ones_like(smallest))
    positive_definite = symmetric & (eigenvalues[..., 0] > tol * largest)
    return {
        "symmetric": symmetric,
        "positive_definite": positive_definite,
        "positive_semidefinite": symmetric & (eigenvalues[..., 0] >= -tol * largest),
        "valid_metric": positive_definite,
        "eigenvalues": eigenvalues,
        "min_eigenvalue": eigenvalues[..., 0],
        "condition_number": xp.where(regular, condition, xp.full_like(condition, math.inf)),
        "max_asymmetry": asymmetry,
    }


def _move_index(metric: Array, metric_name: str, **vector: Array) -> Array:
    xp, v, g = _admit(metric, metric_name, "d", **vector)
    _require_symmetric(**{metric_name: g})
    require_batches_broadcast(2, **dict.fromkeys(vector, v[..., None]), **{metric_name: g})
    return xp.einsum("...ab,...b->...a", g, v)


def _admit(metric: Array, metric_name: str, axes: str, **vectors: Array) -> tuple[Any, ...]:
    """The namespace, the vectors and their metric, once dtypes, ranks and widths fit."""
    xp, *arrays, metric = unify(**vectors, **{metric_name: metric})
    vectors = dict(zip(vectors, arrays, strict=True))
    require_floating(**vectors, **{metric_name: metric})
    require_rank(axes, **vectors)
    _require_square(**{metric_name: metric})
    widths = {name: array.shape[-1] for name, array in vectors.items()}
    require_equal("width", **widths, **{metric_name: metric.shape[-1]})
    return xp, *arrays, metric


def _require_square(**metrics: Array) -> None:
    require_rank("d, d", **metrics)
    for name, g in metrics.items():
        if g.shape[-1] != g.shape[-2] or g.shape[-1] < 1:
            raise ValueError(f"{name} must be a square matrix (..., d, d); got {tuple(g.shape)}.")


def _require_finite(**metrics: Array) -> None:
    for name, g in metrics.items():
        if is_false(namespace_of(g).isfinite(g)):
            raise ValueError(f"{name} must be finite; got inf or nan among its entries.")


def _require_symmetric(**metrics: Array) -> None:
    """Symmetric to half the digits of the dtype: products such as WᵀW are symmetric only up to rounding."""
    _require_finite(**metrics)
    for name, g in metrics.items():
        xp = namespace_of(g)
        asymmetry = _asymmetry(xp, g)
        if is_false(asymmetry <= math.sqrt(xp.finfo(g.dtype).eps) * _largest_entry(xp, g)):
            raise ValueError(
                f"{name} must be symmetric; its largest |{name} - {name}ᵀ| is {float(xp.max(asymmetry)):.3g}. "
                f"Take its symmetric part, ({name} + {name}ᵀ) / 2."
            )


def _symmetric_part(xp: Namespace, g: Array) -> Array:
    return (g + xp.matrix_transpose(g)) / 2


def _asymmetry(xp: Namespace, g: Array) -> Array:
    return xp.max(xp.abs(g - xp.matrix_transpose(g)), axis=(-2, -1))


def _largest_entry(xp: Namespace, g: Array) -> Array:
    return xp.max(xp.abs(g), axis=(-2, -1))
