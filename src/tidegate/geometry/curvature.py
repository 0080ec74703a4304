r"""Curvature from second derivatives, by the Gauss equation.

For a map f with Jacobian J, the second fundamental form II is the part of D²f that is normal to the tangent space, in
the inner product of $\Sigma^{-1}$. Then

    K(u, v) = (<II(u,u), II(v,v)> − |II(u,v)|²) / (|u|²|v|² − <u,v>²)

All derivatives are exact and in forward mode. No Christoffel symbols or third derivatives are needed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.batches import MAX_BYTES, Batch
from tidegate.geometry.differentiation import Function, Numbers
from tidegate.geometry.errors import GeometryError
from tidegate.geometry.metric import Whitening
from tidegate.geometry.tangents import independent_frame, normal_part, orthonormal_plane
from tidegate.tensors.namespace import Array

_NOT_IMMERSED = {
    "problem": "The Jacobian of f does not have full rank",
    "remedy": "Leave out coordinates that f does not depend on or that repeat others, move away from the point, or "
    "measure a slice with tangent='plane'. Look for steps with derivative 0, such as round or detach.",
}
_FLATTENED = {
    "problem": "The derivatives of f along u and v are not independent",
    "remedy": "Choose directions that f depends on. Look for steps with derivative 0, such as round or detach.",
}


def sectional_curvature(
    f: Function,
    x: Array,
    u: Array,
    v: Array,
    *,
    covariance: Array | float | None = None,
    tangent: Literal["full", "plane"] = "full",
    max_bytes: int = MAX_BYTES,
) -> Array:
    r"""Return the sectional curvature of the plane of u and v.

    With `full`, II is normal to the whole tangent space: the result is the curvature of the image of f as a manifold of
    n dimensions, in the direction of the plane. It needs the whole Jacobian, with full rank, and is 0 if f has as many
    outputs as coordinates. With `plane`, II is normal to the images of u and v only: the result is the Gaussian
    curvature of the surface $(s, t) \mapsto f(x + s u + t v)$, at the cost of three nested products for any n. Such a
    slice can be curved inside a flat manifold.

    Args:
        f: Takes one point (n,) and returns one array, which is flattened.
        x: (..., n), of PyTorch or JAX
        u: (..., n)
        v: (..., n); the result depends only on the plane of u and v
        covariance: None for the identity, a number, a vector of variances (N,) or a matrix (N, N)
        tangent: The space that II is normal to.
        max_bytes: Memory budget, which a single plane may exceed.

    Returns:
        (...), the leading axes broadcast

    Raises:
        GeometryError: If the Jacobian does not have full rank, or u and v do not span a plane.
    """
    if tangent not in ("full", "plane"):
        raise InputError("tangent", expected="'full' or 'plane'", got=tangent)
    whitening = Whitening.of(covariance)
    batch = Batch.of(f, x, {"u": u, "v": v}, max_bytes)
    plane = orthonormal_plane(*batch.directions)
    parts: list[Numbers] = []
    for rows in batch.chunks(first=batch.dimension if tangent == "full" else 0, second=3):
        one, other = plane[rows, 0], plane[rows, 1]
        left, right = np.stack([one, other, one], axis=1), np.stack([one, other, other], axis=1)
        first, second, epsilon = batch.second(rows, left, right)
        pair, triangle = independent_frame(whitening.whiten(first[:, :2]), epsilon=epsilon, **_FLATTENED)
        basis = pair
        if tangent == "full":
            jacobian, epsilon = batch.jacobian(rows)
            basis, _ = independent_frame(whitening.whiten(jacobian), epsilon=epsilon, **_NOT_IMMERSED)
        normal = normal_part(whitening.whiten(second), basis)
        products = np.einsum("piN,pjN->pij", normal, normal)
        area = triangle[:, 0, 0] * triangle[:, 1, 1]
        parts.append((products[:, 0, 1] - products[:, 2, 2]) / area**2)
    return batch.result(parts)


def gaussian_curvature(
    f: Function, x: Array, *, covariance: Array | float | None = None, max_bytes: int = MAX_BYTES
) -> Array:
    """Return the Gaussian curvature of a chart of two coordinates.

    Arguments as in `sectional_curvature`; x is (..., 2), the result (...).
    """
    if x.shape[-1:] != (2,):
        hint = "In more dimensions use sectional_curvature with a plane, or scalar_curvature."
        raise InputError("x", expected="(..., 2), a point of a two-dimensional chart", got=tuple(x.shape), hint=hint)
    u, v = np.eye(2)
    return sectional_curvature(f, x, u, v, covariance=covariance, tangent="plane", max_bytes=max_bytes)


def second_fundamental_form(
    f: Function, x: Array, u: Array, v: Array, *, covariance: Array | float | None = None, max_bytes: int = MAX_BYTES
) -> Array:
    r"""Return $II(u, v)$, the part of $D^2 f(u, v)$ that is normal to the whole tangent space, as a vector of outputs.

    It is bilinear and symmetric in u and v, which may be equal. Arguments as in `sectional_curvature`; the result is
    (..., N).
    """
    whitening = Whitening.of(covariance)
    batch = Batch.of(f, x, {"u": u, "v": v}, max_bytes)
    parts: list[Numbers] = []
    for rows in batch.chunks(first=batch.dimension, second=1):
        left, right = (direction[rows, None] for direction in batch.directions)
        _, second, _ = batch.second(rows, left, right)
        jacobian, epsilon = batch.jacobian(rows)
        basis, _ = independent_frame(whitening.whiten(jacobian), epsilon=epsilon, **_NOT_IMMERSED)
        parts.append(whitening.restore(normal_part(whitening.whiten(second), basis))[:, 0])
    return batch.result(parts)


def scalar_curvature(
    f: Function, x: Array, *, covariance: Array | float | None = None, max_bytes: int = MAX_BYTES
) -> Array:
    r"""Return the scalar curvature, $|tr\,II|^2 - |II|^2$.

    It is the sum of $K(e_i, e_j)$ over ordered pairs of an orthonormal frame; in two dimensions, twice the Gaussian
    curvature. It takes n(n + 1)/2 second derivatives and is meant for small n.
    Arguments as in `sectional_curvature`; the result is (...).
    """
    whitening = Whitening.of(covariance)
    batch = Batch.of(f, x, {}, max_bytes)
    if batch.dimension < 2:
        raise GeometryError("x must have at least two coordinates, because a curve has no intrinsic curvature.")
    one, other = np.triu_indices(batch.dimension)
    axes = np.eye(batch.dimension)
    parts: list[Numbers] = []
    for rows in batch.chunks(second=len(one)):
        count = len(batch.points[rows])
        left, right = (np.broadcast_to(axes[index], (count, *axes[index].shape)) for index in (one, other))
        first, second, epsilon = batch.second(rows, left, right)
        jacobian = whitening.whiten(first[:, one == other])
        basis, triangle = independent_frame(jacobian, epsilon=epsilon, **_NOT_IMMERSED)
        normal = normal_part(whitening.whiten(second), basis)
        form = np.empty((count, batch.dimension, batch.dimension, normal.shape[-1]))
        form[:, one, other] = form[:, other, one] = normal
        frame = np.linalg.inv(triangle)
        form = np.einsum("pai,pbj,pijN->pabN", frame, frame, form, optimize=True)
        mean = np.einsum("paaN->pN", form)
        parts.append((mean**2).sum(axis=-1) - (form**2).sum(axis=(1, 2, 3)))
    return batch.result(parts)
