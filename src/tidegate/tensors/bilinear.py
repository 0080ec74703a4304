"""Metrics: lowering and raising indices, bilinear and quadratic forms.

Vectors are `(..., d)` and metrics `(..., d, d)`; leading axes broadcast.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from tidegate._validation import InputError
from tidegate.tensors._checks import check_arrays, is_false, require_count, require_positive
from tidegate.tensors.namespace import Array, Namespace, accumulate


def euclidean_metric(d: int, *, xp: Namespace = np) -> Array:
    r"""Return the Euclidean metric $g_{ab} = \delta_{ab}$, (d, d), in the default floating dtype of `xp`."""
    require_count(1, d=d)
    return xp.eye(d)


def scaled_euclidean_metric(d: int, scale: float | None = None, *, xp: Namespace = np) -> Array:
    r"""Return a multiple of the Euclidean metric, $g_{ab} = s\,\delta_{ab}$.

    Args:
        d: Width of the vectors.
        scale: $s$, a single number above 0; None means $1/\sqrt{d}$, as in attention.
        xp: Array library; the metric has its default floating dtype.
    """
    if scale is None:
        return euclidean_metric(d, xp=xp) / math.sqrt(d)
    if getattr(scale, "ndim", 0) != 0:
        raise InputError("scale", expected="a single number", got=scale, hint="Use diagonal_metric for one per axis.")
    require_positive(scale=scale)
    return euclidean_metric(d, xp=xp) * scale


def learned_metric(W: Array) -> Array:
    r"""Return the metric $g = W^\top W$ that a linear map W (..., k, d) pulls back from Euclidean space.

    Positive semidefinite, and positive definite exactly when W has full column rank (never for k < d).
    """
    xp, weight = check_arrays(W=(W, "..., k, d"))
    return xp.einsum("...ka,...kb->...ab", weight, weight)


def diagonal_metric(diag: Array) -> Array:
    r"""Return the metric $g_{ab} = w_a \delta_{ab}$ with one weight per axis, (..., d).

    Positive definite exactly when all weights are above 0; a weight of 0 gives a singular metric.
    """
    xp, diag = check_arrays(diag=(diag, "..., d"))
    rows = xp.broadcast_to(diag[..., None], (*diag.shape, diag.shape[-1]))
    return xp.tril(xp.triu(rows))


def lower_index(v_upper: Array, g: Array) -> Array:
    r"""Return the covector $v_a = g_{ab} v^b$ of a vector; g must be symmetric."""
    xp, v, g = check_arrays(v_upper=(v_upper, "..., d"), g=(g, "..., d, d"))
    _require_symmetric(xp, "g", g)
    return xp.einsum("...ab,...b->...a", g, v)


def raise_index(v_lower: Array, g_inv: Array) -> Array:
    r"""Return the vector $v^a = g^{ab} v_b$ of a covector; undoes `lower_index` when g_inv is `metric_inverse(g)`."""
    xp, v, g_inv = check_arrays(v_lower=(v_lower, "..., d"), g_inv=(g_inv, "..., d, d"))
    _require_symmetric(xp, "g_inv", g_inv)
    return xp.einsum("...ab,...b->...a", g_inv, v)


def metric_inverse(g: Array) -> Array:
    r"""Return the inverse metric $g^{ab}$ with $g^{ab} g_{bc} = \delta^a_c$, symmetric to the last bit.

    g may be indefinite. Raise InputError, unless g is traced, if g is not symmetric or singular: its smallest
    |eigenvalue| is within d rounding errors of its largest.
    """
    xp, g = check_arrays(g=(g, "..., d, d"))
    _require_symmetric(xp, "g", g)
    wide = accumulate(g)
    sizes = xp.abs(xp.linalg.eigvalsh(wide))
    rounding = g.shape[-1] * float(xp.finfo(wide.dtype).eps)
    if is_false(xp.min(sizes, axis=-1) > rounding * xp.max(sizes, axis=-1)):
        hint = f"Its smallest |eigenvalue| is {float(xp.min(sizes)):.3g}. Add a multiple of euclidean_metric to it."
        raise InputError("g", expected="invertible", hint=hint)
    return xp.astype(_symmetric_part(xp, xp.linalg.inv(wide)), g.dtype, copy=False)


def bilinear_form(u: Array, v: Array, g: Array) -> Array:
    r"""Return the bilinear form $B(u, v) = u^a g_{ab} v^b$, (...).

    g may be any square matrix, such as $W_Q W_K^\top$; the form is symmetric if g is.
    """
    xp, u, v, g = check_arrays(u=(u, "..., d"), v=(v, "..., d"), g=(g, "..., d, d"))
    return xp.einsum("...a,...a->...", u, xp.einsum("...ab,...b->...a", g, v))


def bilinear_form_batch(Q: Array, K: Array, g: Array) -> Array:
    r"""Return the bilinear form of every query with every key, $S_{ij} = Q_{ia} g_{ab} K_{jb}$.

    Args:
        Q: (..., query, d)
        K: (..., key, d)
        g: (..., d, d), any square matrix

    Returns:
        (..., query, key)
    """
    xp, Q, K, g = check_arrays(Q=(Q, "..., query, d"), K=(K, "..., key, d"), g=(g, "..., d, d"))
    return xp.matmul(xp.matmul(Q, g), xp.matrix_transpose(K))


def quadratic_form(v: Array, g: Array) -> Array:
    r"""Return the squared length $B(v, v) = v^a g_{ab} v^b$; it can be negative unless g is positive semidefinite."""
    return bilinear_form(v, v, g)


def inner_product(u: Array, v: Array, metric_type: Literal["euclidean", "scaled"] = "scaled") -> Array:
    r"""Return $u \cdot v$ for "euclidean", or $u \cdot v / \sqrt{d}$, the score of attention, for "scaled"."""
    if metric_type not in ("euclidean", "scaled"):
        raise InputError("metric_type", expected="'euclidean' or 'scaled'", got=metric_type)
    xp, u, v = check_arrays(u=(u, "..., d"), v=(v, "..., d"))
    product = xp.einsum("...a,...a->...", u, v)
    return product / math.sqrt(u.shape[-1]) if metric_type == "scaled" else product


def verify_metric_properties(g: Array, tol: float = 1e-06) -> dict[str, Array]:
    r"""Check the properties of a metric; multiplying g by a positive number does not change the verdicts.

    Args:
        g: (..., d, d)
        tol: Relative tolerance: to the largest |entry| for symmetry, to the largest |eigenvalue| for definiteness.

    Returns:
        A dict of arrays:
            symmetric: (...) bool
            positive_definite: (...) bool, symmetric and every eigenvalue above tol; False for g = 0
            positive_semidefinite: (...) bool, symmetric and no eigenvalue below -tol
            valid_metric: (...) bool, symmetric and positive definite
            eigenvalues: (..., d), ascending, of the symmetric part of g; in float32 or better
            min_eigenvalue: (...), the first of them
            condition_number: (...), largest over smallest |eigenvalue|; inf if one is 0
            max_asymmetry: (...), the largest $|g_{ab} - g_{ba}|$
    """
    xp, g = check_arrays(g=(g, "..., d, d"))
    _require_finite(xp, "g", g)
    if is_false(tol >= 0):
        raise InputError("tol", expected="at least 0", got=tol)
    asymmetry, largest_entry = _asymmetry_and_largest_entry(xp, g)
    symmetric = asymmetry <= tol * largest_entry
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


def _require_finite(xp: Namespace, name: str, g: Array) -> None:
    if g.shape[-1] < 1:
        raise InputError(name, expected="of shape (..., d, d) with d at least 1", got=tuple(g.shape))
    if is_false(xp.isfinite(g)):
        raise InputError(name, expected="finite", hint="It has inf or nan among its entries.")


def _require_symmetric(xp: Namespace, name: str, g: Array) -> None:
    """Check symmetry to half the digits of the dtype: products such as WᵀW are symmetric up to rounding."""
    _require_finite(xp, name, g)
    asymmetry, largest_entry = _asymmetry_and_largest_entry(xp, g)
    if is_false(asymmetry <= math.sqrt(xp.finfo(g.dtype).eps) * largest_entry):
        raise InputError(
            name,
            expected="symmetric",
            hint=f"Its largest |{name} - {name}ᵀ| is {float(xp.max(asymmetry)):.3g}. "
            f"Take its symmetric part, ({name} + {name}ᵀ) / 2.",
        )


def _symmetric_part(xp: Namespace, g: Array) -> Array:
    return (g + xp.matrix_transpose(g)) / 2


def _asymmetry_and_largest_entry(xp: Namespace, g: Array) -> tuple[Array, Array]:
    return xp.max(xp.abs(g - xp.matrix_transpose(g)), axis=(-2, -1)), xp.max(xp.abs(g), axis=(-2, -1))
