r"""Gibbs weights and what follows from them: partition function, free energy, entropy, temperature, Jacobian.

In all functions, `energies` (..., n) are scores: larger means likelier, so that the weights are
$\exp(E_j/T)/Z$ without a minus sign. `temperature` is above 0: a number, or an array that broadcasts to one for each
row, (..., 1). `mask` is bool, broadcasts to energies, and is True where a state counts; a score of -inf counts as
masked. A row in which no state counts is empty: its weights are 0, with gradient 0. `probs` are weights (..., n), at
least 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tidegate.tensors._checks import check_arrays, require_count, require_positive, require_rank
from tidegate.tensors._gibbs import boltzmann_factors, gibbs_arguments
from tidegate.tensors.namespace import accumulate, unify

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array


def softmax_rows(x: Array) -> Array:
    r"""Return the softmax over the last axis, $p_j = \exp(x_j) / \sum_k \exp(x_k)$: Gibbs weights at temperature 1."""
    return gibbs_distribution(x)


def log_softmax(x: Array) -> Array:
    r"""Return the logarithm of the softmax over the last axis, $x_j - \log \sum_k \exp(x_k)$.

    It is exact where the weight underflows, and -inf, with gradient 0, where x is -inf.
    """
    xp, x, temperature, _ = gibbs_arguments(x, 1.0, None)
    rows = boltzmann_factors(x, temperature, None)
    return xp.astype(xp.where(rows.allowed, rows.exponents - xp.log(rows.total), -math.inf), x.dtype)


def gibbs_distribution(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return Gibbs weights $p_j = \exp(E_j/T) / \sum_k \exp(E_k/T)$ over the states that count.

    A row with a nan or +inf among the states that count is nan.

    Returns:
        (..., n); each row sums to 1, or to 0 (with gradient 0) if no state counts
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    return xp.astype(rows.factors / rows.total, energies.dtype)


def log_partition(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return the logarithm of the partition function, $\log Z = \log \sum_j \exp(E_j/T)$, without overflow.

    Returns:
        (...); -inf, with gradient 0, for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    logarithm = xp.where(rows.empty, -math.inf, rows.peak / temperature + xp.log(rows.total))
    return xp.astype(logarithm[..., 0], energies.dtype)


def partition_function(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Return the partition function $Z = \sum_j \exp(E_j/T)$; it overflows to inf where `log_partition` does not.

    Returns:
        (...); 0 for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    logarithm = log_partition(accumulate(energies), temperature, mask)
    return xp.astype(xp.exp(logarithm), energies.dtype)


def free_energy(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Return the free energy $F = -T \log Z$, without overflow.

    Returns:
        (...); +inf, with gradient 0, for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    free = xp.where(rows.empty, math.inf, -(rows.peak + temperature * xp.log(rows.total)))
    return xp.astype(free[..., 0], energies.dtype)


def entropy(probs: Array, eps: float = 1e-12) -> Array:
    r"""Return the entropy in nats, $S = -\sum_j p_j \log \max(p_j, \epsilon)$, (...).

    `eps` bounds the logarithm: the value is exact unless a probability lies between 0 and eps, an absent state adds 0,
    and the gradient is finite, at most $-\log \epsilon$. A row of zeros has entropy 0.
    """
    xp, probs = check_arrays(probs=(probs, "..., states"))
    require_positive(eps=eps)
    p = accumulate(probs)
    return xp.astype(xp.sum(p * -xp.log(xp.where(p > eps, p, eps)), axis=-1), probs.dtype)


def attention_entropy(A: Array, eps: float = 1e-12) -> Array:
    """Return the entropy of each query's weights (..., query, key) in nats; 0 for a query that sees nothing.

    See `entropy` for eps.
    """
    _, A = unify(A=A)
    require_rank("..., query, key", A=A)
    return entropy(A, eps)


def max_entropy(n: int) -> float:
    r"""Return the largest entropy that n states can have, $\log n$, as a number that mixes with any array."""
    require_count(1, n=n)
    return math.log(n)


def normalized_entropy(A: Array, eps: float = 1e-12) -> Array:
    r"""Return the entropy as a share of the largest possible, $S / \log n$: 0 for one state, 1 for equal weights.

    A single key, which is both, has 0, like its entropy. Masked keys are counted in n.
    """
    spread = entropy(A, eps)
    num_states = A.shape[-1]
    return spread / max_entropy(num_states) if num_states > 1 else spread


def temperature_sweep(energies: Array, temperatures: Array) -> Array:
    """Return Gibbs weights (temperature, ..., n) at each of several temperatures (temperature,)."""
    xp, energies, temperatures = check_arrays(
        energies=(energies, "..., states"), temperatures=(temperatures, "temperature")
    )
    require_positive(temperatures=temperatures)
    rows = boltzmann_factors(energies, xp.reshape(temperatures, (-1,) + (1,) * energies.ndim), None)
    return xp.astype(rows.factors / rows.total, energies.dtype)


def effective_number_of_states(probs: Array) -> Array:
    r"""Return $\exp(S)$, (...): n for n equal weights, 1 for one state alone, 0 for a row of zeros."""
    spread = entropy(probs)
    xp, probs = unify(probs=probs)
    return xp.where(xp.any(probs != 0, axis=-1), xp.exp(spread), 0.0)


def softmax_jacobian(probs: Array) -> Array:
    r"""Return the Jacobian of the softmax in its scores, $\partial p_i / \partial E_j = p_i (\delta_{ij} - p_j)$.

    At temperature T it is this divided by T. An empty row has Jacobian 0.

    Args:
        probs: (..., n), the softmax's value

    Returns:
        (..., n, n)
    """
    xp, probs = check_arrays(probs=(probs, "..., states"))
    _, p, diagonal = unify(probs=accumulate(probs), diagonal=np.eye(probs.shape[-1], dtype=bool))
    jacobian = xp.where(diagonal, p[..., :, None], 0.0) - p[..., :, None] * p[..., None, :]
    return xp.astype(jacobian, probs.dtype)


def softmax_jacobian_batched(probs: Array) -> Array:
    """Return `softmax_jacobian` of a batch of rows, (..., batch, n); raise InputError for a single row."""
    _, probs = unify(probs=probs)
    require_rank("..., batch, states", probs=probs)
    return softmax_jacobian(probs)
