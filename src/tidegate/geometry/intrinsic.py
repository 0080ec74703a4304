r"""Intrinsic curvature, from the metric only: Christoffel symbols and the Riemann tensor, for small dimensions.

It uses third derivatives of f and no normal vectors, one point at a time. It is slow, independent of
`tidegate.geometry.curvature`, and serves to check it.
"""

from __future__ import annotations

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.batches import MAX_BYTES, Batch
from tidegate.geometry.differentiation import Function, Numbers
from tidegate.geometry.errors import GeometryError
from tidegate.geometry.metric import Whitening
from tidegate.geometry.tangents import require_finite
from tidegate.tensors.namespace import Array


def christoffel_symbols(f: Function, x: Array, *, covariance: Array | float | None = None) -> Array:
    r"""Return the Christoffel symbols of the pullback metric at one point (n,), (n, n, n), indexed k, i, j.

    $\Gamma^k_{ij} = \tfrac12 g^{kl} (\partial_i g_{jl} + \partial_j g_{il} - \partial_l g_{ij})$
    """
    batch, (metric, slope, _) = _metric_jet(f, x, {}, covariance)
    return batch.by.restore(np.einsum("kl,lij->kij", np.linalg.inv(metric), _lower_first_index(slope)))


def riemann_tensor(f: Function, x: Array, *, covariance: Array | float | None = None) -> Array:
    r"""Return the Riemann tensor at one point (n,), with lower indices; K is positive on a sphere.

    $K(u, v)$ is $R_{ijkl} u^i v^j v^k u^l$ divided by the squared area of u and v.

    $R_{ijkl} = \tfrac12 (\partial_j \partial_l g_{ik} + \partial_i \partial_k g_{jl} - \partial_j \partial_k g_{il} -
    \partial_i \partial_l g_{jk}) + g_{mn} (\Gamma^m_{jl} \Gamma^n_{ik} - \Gamma^m_{il} \Gamma^n_{jk})$
    """
    batch, jet = _metric_jet(f, x, {}, covariance)
    return batch.by.restore(_riemann(*jet))


def intrinsic_curvature(f: Function, x: Array, u: Array, v: Array, *, covariance: Array | float | None = None) -> Array:
    """Return the sectional curvature at one point x of the plane of u and v, all (n,), by the Riemann tensor.

    It equals `sectional_curvature` with `tangent="full"`.
    """
    batch, (metric, slope, bend) = _metric_jet(f, x, {"u": u, "v": v}, covariance)
    one, other = (direction[0] for direction in batch.directions)
    area = (one @ metric @ one) * (other @ metric @ other) - (one @ metric @ other) ** 2
    if not area > 0:
        raise GeometryError(
            f"u and v do not span a plane: its squared area is {area:.3g}. Give independent directions."
        )
    riemann = np.einsum("ijkl,i,j,k,l->", _riemann(metric, slope, bend), one, other, other, one)
    return batch.by.restore(np.asarray(riemann / area))


def intrinsic_scalar_curvature(f: Function, x: Array, *, covariance: Array | float | None = None) -> Array:
    r"""Return the scalar curvature $g^{il} g^{jk} R_{ijkl}$ at one point (n,), by the Riemann tensor."""
    batch, jet = _metric_jet(f, x, {}, covariance)
    inverse = np.linalg.inv(jet[0])
    return batch.by.restore(np.einsum("il,jk,ijkl->", inverse, inverse, _riemann(*jet)))


def _metric_jet(
    f: Function, x: Array, directions: dict[str, Array], covariance: Array | float | None
) -> tuple[Batch, tuple[Numbers, Numbers, Numbers]]:
    batch = Batch.of(f, x, directions, MAX_BYTES)
    if batch.shape:
        raise InputError("x", expected="one point (coordinates,) on the intrinsic route", got=tuple(x.shape))
    _, width = batch.by.footprint(f, batch.points[0])
    whitening = Whitening.of(covariance).whiten(np.eye(width)).T
    jet = batch.by.metric_jet(f, batch.points[0], whitening)
    metric, slope, bend = (part.astype(np.float64) for part in jet)
    for part in (metric, slope, bend):
        require_finite("The metric or a derivative of it", part[None])
    eigenvalues = np.linalg.eigvalsh(metric)
    if eigenvalues[0] <= width * np.finfo(np.float64).eps * eigenvalues[-1]:
        raise GeometryError(
            f"The metric is singular at x: its smallest eigenvalue is {eigenvalues[0]:.3g}. Leave out coordinates that "
            "f does not depend on, or move away from the point."
        )
    return batch, (metric, slope, bend)


def _lower_first_index(slope: Numbers) -> Numbers:
    """Return the Christoffel symbols Γ_lij from ∂_k g_ij, with the derivative last."""
    return (np.einsum("jli->lij", slope) + np.einsum("ilj->lij", slope) - np.einsum("ijl->lij", slope)) / 2


def _riemann(metric: Numbers, slope: Numbers, bend: Numbers) -> Numbers:
    lowered = _lower_first_index(slope)
    raised = np.einsum("kl,lij->kij", np.linalg.inv(metric), lowered)
    linear = (
        np.einsum("ikjl->ijkl", bend)
        + np.einsum("jlik->ijkl", bend)
        - np.einsum("iljk->ijkl", bend)
        - np.einsum("jkil->ijkl", bend)
    ) / 2
    quadratic = np.einsum("mjl,mik->ijkl", raised, lowered) - np.einsum("mil,mjk->ijkl", raised, lowered)
    return linear + quadratic
