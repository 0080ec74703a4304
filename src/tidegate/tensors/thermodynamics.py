r"""Thermodynamics and information geometry of Gibbs weights, in closed form.

Scores are negative energies: a state with score $E_j$ has energy $-E_j$. With the weights $p_j = \exp(E_j/T)/Z$,

    internal energy  U = -<E>           entropy        S = -sum_j p_j log p_j
    free energy      F = -T log Z       and so         F = U - T S

The natural parameters of the family are the scores over the temperature, $E_j/T$. `energies`, `temperature`, `mask` and
`probs` are those of `tidegate.tensors.softmax`.
"""

from __future__ import annotations

import math

from tidegate.tensors._checks import check_arrays, require_floating, require_positive, require_same_shape
from tidegate.tensors.namespace import Array, accumulate, namespace_of, unify
from tidegate.tensors.softmax import boltzmann_factors, gibbs_arguments, softmax_jacobian, split_number


def mean_score(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return the mean score under the Gibbs weights, $\langle E \rangle = \sum_j p_j E_j$, (...).

    A score of -inf adds 0. An empty row has 0, with gradient 0.
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    peak, _, mean, _ = _reduced_scores(energies, temperature, mask)
    return xp.astype((peak + temperature * mean)[..., 0], energies.dtype)


def internal_energy(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return the internal energy $U = -\langle E \rangle$, minus `mean_score`, so that $F = U - T S$."""
    return -mean_score(energies, temperature, mask)


def entropy_from_log_partition(log_partition: Array, mean_score: Array, temperature: Array | float = 1.0) -> Array:
    r"""Return the entropy without the weights, $S = \log Z - \langle E \rangle / T$, in nats.

    Args:
        log_partition: Any shape; -inf stands for an empty row.
        mean_score: Like log_partition.
        temperature: Above 0; a number, or an array like log_partition or without axes.

    Returns:
        Like log_partition; 0, with gradient 0, for an empty row
    """
    number, array = split_number(temperature)
    xp, log_partition, mean_score, array = unify(log_partition=log_partition, mean_score=mean_score, temperature=array)
    require_floating(log_partition=log_partition, mean_score=mean_score, temperature=array)
    require_same_shape(log_partition=log_partition, mean_score=mean_score)
    if array is not None and array.ndim > 0:
        require_same_shape(log_partition=log_partition, temperature=array)
    require_positive(temperature=temperature)
    empty = log_partition == -math.inf
    logarithm = xp.where(empty, 0.0, accumulate(log_partition))
    mean = xp.where(empty, 0.0, accumulate(mean_score))
    return xp.astype(logarithm - mean / (array if number is None else number), log_partition.dtype)


def heat_capacity(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return the heat capacity $C = dU/dT = \mathrm{Var}_p(E) / T^2$, (...); 0, with gradient 0, for an empty row."""
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    _, weights, mean, reduced = _reduced_scores(energies, temperature, mask)
    return xp.astype(xp.sum(weights * (reduced - mean) ** 2, axis=-1), energies.dtype)


def fisher_metric(probs: Array) -> Array:
    r"""Return the Fisher metric of the Gibbs family in its natural parameters, $g_{ij} = p_i (\delta_{ij} - p_j)$.

    It is the covariance of the states' indicators, and equals the softmax Jacobian. In the scores themselves, at a
    temperature T, it is this over $T^2$. It is singular: adding a constant to all scores changes nothing.
    """
    return softmax_jacobian(probs)


def natural_gradient(gradient: Array, probs: Array) -> Array:
    r"""Return the direction of steepest ascent under the Fisher metric, $x = g^+ \nabla$, without building the metric.

    Let a bar denote the projection onto the tangent space of the simplex's face that p lies in: subtract the mean over
    the states with $p_j > 0$, and set the others to 0. Then $x$ is the smallest solution of $g x = \bar\nabla$,
    $x = \overline{\bar\nabla_j / p_j}$. A face of one state, like an empty row, has no tangent: x = 0.

    Args:
        gradient: (..., n), derivatives in the natural parameters
        probs: (..., n); leading axes broadcast against those of gradient
    """
    xp, gradient, probs = check_arrays(gradient=(gradient, "..., states"), probs=(probs, "..., states"))
    p = accumulate(probs)
    support = p != 0
    tangent = _center_on_support(accumulate(gradient), support)
    solution = _center_on_support(tangent / xp.where(support, p, 1.0), support)
    return xp.astype(solution, gradient.dtype)


def _reduced_scores(
    energies: Array, temperature: Array | float, mask: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Return each row's peak, weights, mean reduced score and reduced scores (E - peak)/T, 0 where the weight is 0."""
    xp = namespace_of(energies)
    rows = boltzmann_factors(energies, temperature, mask)
    weights = rows.factors / rows.total
    # A weight that underflows may have a score whose square overflows.
    reduced = xp.where(weights == 0, 0.0, rows.exponents)
    return rows.peak, weights, xp.sum(weights * reduced, axis=-1, keepdims=True), reduced


def _center_on_support(values: Array, support: Array) -> Array:
    """Subtract the mean over the support, and set the rest to 0."""
    xp = namespace_of(values)
    count = xp.sum(xp.astype(support, values.dtype), axis=-1, keepdims=True)
    total = xp.sum(xp.where(support, values, 0.0), axis=-1, keepdims=True)
    return xp.where(support, values - total / xp.where(count == 0, 1.0, count), 0.0)
