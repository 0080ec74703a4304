r"""Gibbs weights and what follows from them: partition function, free energy, entropy, temperature, Jacobian.

`energies` are scores: larger means likelier, so that the weights are $\exp(E_j/T)/Z$ without a minus sign. A state does
not count if it is masked or its score is -inf. A row in which no state counts is empty: its weights are 0, with
gradient 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tidegate.tensors._checks import require_count, require_floating, require_positive, require_rank
from tidegate.tensors._gibbs import boltzmann_factors, gibbs_arguments
from tidegate.tensors.namespace import accumulate, unify

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array

__all__ = [
    "attention_entropy",
    "effective_number_of_states",
    "entropy",
    "free_energy",
    "gibbs_distribution",
    "log_partition",
    "log_softmax",
    "max_entropy",
    "normalized_entropy",
    "partition_function",
    "softmax_jacobian",
    "softmax_jacobian_batched",
    "softmax_rows",
    "temperature_sweep",
]


def softmax_rows(x: Array) -> Array:
    r"""Softmax over the last axis, $p_j = \exp(x_j) / \sum_k \exp(x_k)$: the Gibbs distribution at temperature 1.

    x       : (..., n); -inf gives weight 0
    returns : (..., n); each row sums to 1, or to 0 if all of it is -inf
    """
    return gibbs_distribution(x)


def log_softmax(x: Array) -> Array:
    r"""Logarithm of the softmax over the last axis, $x_j - \log \sum_k \exp(x_k)$, also where the weight underflows.

    x       : (..., n)
    returns : (..., n); -inf, with gradient 0, where x is -inf
    """
    xp, x, temperature, _ = gibbs_arguments(x, 1.0, None)
    rows = boltzmann_factors(x, temperature, None)
    return xp.astype(xp.where(rows.allowed, rows.exponents - xp.log(rows.total), -math.inf), x.dtype)


def gibbs_distribution(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Gibbs weights $p_j = \exp(E_j/T) / \sum_k \exp(E_k/T)$ over the states that count.

    A row with a nan or +inf among the states that count is nan.

    energies    : (..., n) scores, larger means likelier; -inf gives weight 0
    temperature : above 0; a number, or an array that broadcasts to one for each row, (..., 1)
    mask        : bool, broadcasts to energies, True where a state counts
    returns     : (..., n); each row sums to 1, or to 0 (with gradient 0) if no state counts
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    return xp.astype(rows.factors / rows.total, energies.dtype)


def log_partition(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Logarithm of the partition function, $\log Z = \log \sum_j \exp(E_j/T)$, without overflow.

    energies    : (..., n) scores
    temperature : above 0; a number, or an array that broadcasts to one for each row, (..., 1)
    mask        : bool, broadcasts to energies, True where a state counts
    returns     : (...); -inf, with gradient 0, for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    logarithm = xp.where(rows.empty, -math.inf, rows.peak / temperature + xp.log(rows.total))
    return xp.astype(logarithm[..., 0], energies.dtype)


def partition_function(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Partition function $Z = \sum_j \exp(E_j/T)$; it overflows to inf where `log_partition` does not.

    energies    : (..., n) scores
    temperature : above 0; a number, or an array that broadcasts to one for each row, (..., 1)
    mask        : bool, broadcasts to energies, True where a state counts
    returns     : (...); 0 for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    logarithm = log_partition(accumulate(energies), temperature, mask)
    return xp.astype(xp.exp(logarithm), energies.dtype)


def free_energy(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Free energy $F = -T \log Z$, without overflow.

    energies    : (..., n) scores
    temperature : above 0; a number, or an array that broadcasts to one for each row, (..., 1)
    mask        : bool, broadcasts to energies, True where a state counts
    returns     : (...); +inf, with gradient 0, for an empty row
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    free = xp.where(rows.empty, math.inf, -(rows.peak + temperature * xp.log(rows.total)))
    return xp.astype(free[..., 0], energies.dtype)


def entropy(probs: Array, eps: float = 1e-12) -> Array:
    r"""Entropy in nats, $S = -\sum_j p_j \log \max(p_j, \epsilon)$.

    `eps` bounds the logarithm: the value is exact unless a probability lies between 0 and eps, an absent state adds 0,
    and the gradient is finite, at most $-\log \epsilon$. A row of zeros has entropy 0.

    probs   : (..., n), at least 0
    returns : (...)
    """
    xp, probs = unify(probs=probs)
    require_floating(probs=probs)
    require_rank("states", probs=probs)
    require_positive(eps=eps)
    p = accumulate(probs)
    return xp.astype(xp.sum(p * -xp.log(xp.where(p > eps, p, eps)), axis=-1), probs.dtype)


def attention_entropy(A: Array, eps: float = 1e-12) -> Array:
    """Entropy of each query's weights, in nats; 0 for a query that sees nothing. See `entropy` for eps.

    A       : (..., query, key)
    returns : (..., query)
    """
    _, A = unify(A=A)
    require_rank("query, key", A=A)
    return entropy(A, eps)


def max_entropy(n: int) -> float:
    r"""Largest entropy that n states can have, $\log n$, that of equal weights; a number, to mix with any array."""
    require_count(1, n=n)
    return math.log(n)


def normalized_entropy(A: Array, eps: float = 1e-12) -> Array:
    r"""Entropy as a share of the largest possible, $S / \log n$: 0 for one state alone, 1 for equal weights.

    A single key, which is both, has 0, like its entropy. Masked keys are counted in n.

    A       : (..., n)
    returns : (...)
    """
    spread = entropy(A, eps)
    num_states = A.shape[-1]
    return spread / max_entropy(num_states) if num_states > 1 else spread


def temperature_sweep(energies: Array, temperatures: Array) -> Array:
    """Gibbs weights at each of several temperatures.

    energies     : (..., n) scores
    temperatures : (temperature,), all above 0
    returns      : (temperature, ..., n)
    """
    xp, energies, temperatures = unify(energies=energies, temperatures=temperatures)
    require_floating(energies=energies, temperatures=temperatures)
    require_rank("states", energies=energies)
    require_rank("temperature", exact=True, temperatures=temperatures)
    require_positive(temperatures=temperatures)
    rows = boltzmann_factors(energies, xp.reshape(temperatures, (-1,) + (1,) * energies.ndim), None)
    return xp.astype(rows.factors / rows.total, energies.dtype)


def effective_number_of_states(probs: Array) -> Array:
    r"""Effective number of states $\exp(S)$: n for n equal weights, 1 for one state alone, 0 for a row of zeros.

    probs   : (..., n), at least 0
    returns : (...)
    """
    spread = entropy(probs)
    xp, probs = unify(probs=probs)
    return xp.where(xp.any(probs != 0, axis=-1), xp.exp(spread), 0.0)


def softmax_jacobian(probs: Array) -> Array:
    r"""Jacobian of the softmax in its scores, $\partial p_i / \partial E_j = p_i (\delta_{ij} - p_j)$ at T = 1.

    At temperature T it is this divided by T. An empty row has Jacobian 0.

    probs   : (..., n) the softmax's value
    returns : (..., n, n)
    """
    xp, probs = unify(probs=probs)
    require_floating(probs=probs)
    require_rank("states", probs=probs)
    _, p, diagonal = unify(probs=accumulate(probs), diagonal=np.eye(probs.shape[-1], dtype=bool))
    jacobian = xp.where(diagonal, p[..., :, None], 0.0) - p[..., :, None] * p[..., None, :]
    return xp.astype(jacobian, probs.dtype)


def softmax_jacobian_batched(probs: Array) -> Array:
    """`softmax_jacobian` of a batch of rows; a single row is refused.

    probs   : (..., batch, n)
    returns : (..., batch, n, n)
    """
    _, probs = unify(probs=probs)
    require_rank("batch, states", probs=probs)
    return softmax_jacobian(probs)
