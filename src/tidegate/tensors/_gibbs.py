"""The stable core that every function of a Gibbs distribution shares: its arguments and its Boltzmann factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from tidegate._validation import InputError
from tidegate.tensors._checks import require_floating, require_mask, require_positive, require_rank
from tidegate.tensors.namespace import accumulate, namespace_of, unify

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array, Namespace


class Boltzmann(NamedTuple):
    r"""Boltzmann factors of rows of scores, $\exp(E_j/T)$ over the largest of their row; in float32 or better."""

    allowed: Array
    """(..., n) bool: which states count. Masked ones and those with score -inf do not."""

    peak: Array
    """(..., 1): the largest allowed score; 0 in an empty row, one without allowed states."""

    exponents: Array
    """(..., n): $(E_j - peak)/T$; 0 for states that do not count."""

    factors: Array
    """(..., n): $\\exp((E_j - peak)/T)$; 0 for states that do not count."""

    total: Array
    """(..., 1): the sum of the factors, at least 1; 1 in an empty row too, so that it may divide."""

    empty: Array
    """(..., 1) bool: which rows have no allowed state."""


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
    """Return a temperature as (number, None) or (None, array): a number leaves every dtype as it is, an array not."""
    return (float(temperature), None) if isinstance(temperature, int | float) else (None, temperature)


def boltzmann_factors(energies: Array, temperature: Array | float, mask: Array | None) -> Boltzmann:
    """Compute the Boltzmann factors of each row, with zero gradient wherever a state does not count."""
    xp = namespace_of(energies)
    energies = accumulate(energies)
    # Not `>`, which would hide a nan as if it were masked.
    allowed = energies != -math.inf
    if mask is not None:
        allowed = allowed & mask
    seen = xp.where(allowed, energies, -math.inf)
    # A maximum over no states at all is an error: add -inf to an empty sum.
    over_states = {"axis": -1, "keepdims": True}
    largest = xp.max(seen, **over_states) if seen.shape[-1] else xp.sum(seen, **over_states) - math.inf
    empty = largest == -math.inf
    peak = xp.where(empty, 0.0, largest)
    # Subtracting first keeps the quotient at or below 0, so that no temperature is too small.
    exponents = (xp.where(allowed, energies, peak) - peak) / temperature
    factors = xp.where(allowed, xp.exp(exponents), 0.0)
    total = xp.where(empty, 1.0, xp.sum(factors, axis=-1, keepdims=True))
    return Boltzmann(allowed, peak, exponents, factors, total, empty)
