r"""Gibbs weights, partition function, free energy, entropy, and the softmax Jacobian.

In all functions, `energies` (..., n) are scores: larger means more likely, so that the weights are
$\exp(E_j/T)/Z$ without a minus sign. `temperature` is above 0: a number, or an array that broadcasts to one for each
row, (..., 1). `mask` is bool, broadcasts to energies, and is False for states to ignore, like a score of -inf. A row
without a state left is empty: its weights are 0, with gradient 0. `probs` are weights (..., n), at least 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tidegate._validation import InputError
from tidegate.tensors._checks import (
    check_arrays,
    require_count,
    require_floating,
    require_mask,
    require_positive,
    require_rank,
)
from tidegate.tensors.namespace import Array, Namespace, accumulate, namespace_of, unify


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
    r"""Return Gibbs weights $p_j = \exp(E_j/T) / \sum_k \exp(E_k/T)$ over the unmasked states, (..., n).

    Each row sums to 1, or to 0 (with gradient 0) if it is empty. An unmasked nan or +inf makes its row nan.
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    return xp.astype(rows.factors / rows.total, energies.dtype)


def log_partition(energies: Array, temperature: Array | float = 1.0, mask: Array | None = None) -> Array:
    r"""Return the logarithm of the partition function, $\log Z = \log \sum_j \exp(E_j/T)$, without overflow, (...).

    An empty row has -inf, with gradient 0.
    """
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    rows = boltzmann_factors(energies, temperature, mask)
    logarithm = xp.where(rows.empty, -math.inf, rows.peak / temperature + xp.log(rows.total))
    return xp.astype(logarithm[..., 0], energies.dtype)


def partition_function(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Return the partition function $Z = \sum_j \exp(E_j/T)$, which may overflow to inf, (...); 0 for an empty row."""
    xp, energies, temperature, mask = gibbs_arguments(energies, temperature, mask)
    logarithm = log_partition(accumulate(energies), temperature, mask)
    return xp.astype(xp.exp(logarithm), energies.dtype)


def free_energy(energies: Array, temperature: Array | float = 1.0, *, mask: Array | None = None) -> Array:
    r"""Return the free energy $F = -T \log Z$, without overflow, (...); +inf, with gradient 0, for an empty row."""
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
    """Return the entropy of each query's weights (..., query, key) in nats; 0 for a fully masked query."""
    _, A = unify(A=A)
    require_rank("..., query, key", A=A)
    return entropy(A, eps)


def max_entropy(n: int) -> float:
    r"""Return the largest possible entropy of n states, $\log n$, as a float."""
    require_count(1, n=n)
    return math.log(n)


def normalized_entropy(A: Array, eps: float = 1e-12) -> Array:
    r"""Return the entropy as a fraction of the largest possible, $S / \log n$: 0 for one state, 1 for equal weights.

    A single key has 0. n includes masked keys.
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
    r"""Return $\exp(S)$, (...): n for n equal weights, 1 for a single state, 0 for a row of zeros."""
    spread = entropy(probs)
    xp, probs = unify(probs=probs)
    return xp.where(xp.any(probs != 0, axis=-1), xp.exp(spread), 0.0)


def softmax_jacobian(probs: Array) -> Array:
    r"""Return the Jacobian (..., n, n) of the softmax, $\partial p_i / \partial E_j = p_i (\delta_{ij} - p_j)$.

    At temperature T it is this divided by T. An empty row has Jacobian 0.
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


class Boltzmann(NamedTuple):
    r"""Boltzmann factors of rows of scores, $\exp(E_j/T)$ over the largest of their row; in float32 or better."""

    allowed: Array
    """(..., n) bool: False for masked states and for scores of -inf."""
    peak: Array
    """(..., 1): the largest allowed score; 0 in an empty row, one without allowed states."""
    exponents: Array
    """(..., n): $(E_j - peak)/T$; 0 for states that are not allowed."""
    factors: Array
    """(..., n): $\\exp((E_j - peak)/T)$; 0 for states that are not allowed."""
    total: Array
    """(..., 1): the sum of the factors, at least 1; also 1 in an empty row, to divide by."""
    empty: Array
    """(..., 1) bool: True for rows without allowed states."""


def gibbs_arguments(
    energies: Array, temperature: Array | float, mask: Array | None
) -> tuple[Namespace, Array, Array | float, Array | None]:
    """Return the namespace and the checked arguments of a Gibbs distribution; a number stays a number."""
    number, array = split_number(temperature)
    xp, energies, array, mask = unify(energies=energies, temperature=array, mask=mask)
    require_floating(energies=energies, temperature=array)
    require_rank("..., states", energies=energies)
    require_mask(mask, tuple(energies.shape), axes="states")
    require_positive(temperature=temperature)
    if number is not None:
        return xp, energies, number, mask
    given, wanted = tuple(array.shape), (*energies.shape[:-1], 1)
    pairs = zip(reversed(given), reversed(wanted), strict=False)
    if len(given) > len(wanted) or any(size not in (1, row) for size, row in pairs):
        expected = f"a number or broadcastable to one for each row, (..., 1) = {wanted}"
        raise InputError("temperature", expected=expected, got=given)
    return xp, energies, array, mask


def split_number(temperature: Array | float) -> tuple[float | None, Array | None]:
    """Return a temperature as (number, None) or (None, array): arrays take part in the promotion of dtypes."""
    return (float(temperature), None) if isinstance(temperature, int | float) else (None, temperature)


def boltzmann_factors(energies: Array, temperature: Array | float, mask: Array | None) -> Boltzmann:
    """Compute the Boltzmann factors of each row, with gradient 0 for states that are not allowed."""
    xp = namespace_of(energies)
    energies = accumulate(energies)
    # Not `>`, which would hide a nan as if it were masked.
    allowed = energies != -math.inf
    if mask is not None:
        allowed = allowed & mask
    seen = xp.where(allowed, energies, -math.inf)
    # A maximum over zero states raises an error, so use an empty sum less infinity.
    over_states = {"axis": -1, "keepdims": True}
    largest = xp.max(seen, **over_states) if seen.shape[-1] else xp.sum(seen, **over_states) - math.inf
    empty = largest == -math.inf
    peak = xp.where(empty, 0.0, largest)
    # Subtracting first keeps the quotient at or below 0, so that no temperature is too small.
    exponents = (xp.where(allowed, energies, peak) - peak) / temperature
    factors = xp.where(allowed, xp.exp(exponents), 0.0)
    total = xp.where(empty, 1.0, xp.sum(factors, axis=-1, keepdims=True))
    return Boltzmann(allowed, peak, exponents, factors, total, empty)
