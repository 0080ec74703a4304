"""Hopfield networks: stored patterns are minima of an energy, and attention is one step of retrieval.

`patterns` are `(..., num_patterns, d)` and a `state` is `(..., d)`; their leading axes broadcast, so many states
can share one set of patterns. `beta` is an inverse temperature, one number above 0.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from tidegate._validation import InputError
from tidegate.tensors._checks import broadcast_batches, check_arrays, require_count, require_positive
from tidegate.tensors.namespace import Array, Namespace, namespace_of, unify
from tidegate.tensors.random import normal, split
from tidegate.tensors.softmax import free_energy, gibbs_distribution


class Retrieval(NamedTuple):
    """The result of `hopfield_retrieve`."""

    state: Array
    """(..., d), the last state."""
    trajectory: Array
    """(..., max_iterations + 1, d), from the query to the last state."""
    energies: Array
    """(..., max_iterations + 1), the energy at each point of the trajectory; it never rises."""
    num_iterations: Array
    """(...) integer, the number of updates before the state converged."""


def classical_hopfield_energy(state: Array, patterns: Array) -> Array:
    r"""Return the energy $-\frac12 s^T W s$ with Hebb's weights $W = \frac1d \sum_\mu \xi_\mu \xi_\mu^T$, diagonal 0.

    Equal to $-\frac1{2d} \sum_\mu (\xi_\mu \cdot s)^2 + \frac1{2d} \sum_i s_i^2 \sum_\mu \xi_{\mu i}^2$; for entries of
    ±1 the second term is the constant num_patterns / 2. W is never built.
    """
    xp, state, patterns = _state_and_patterns(state, patterns)
    return -xp.sum(state * _hebb_field(state, patterns), axis=-1) / (2 * state.shape[-1])


def classical_hopfield_update(state: Array, patterns: Array) -> Array:
    r"""Set every neuron at once to the sign of its field: $s' = \mathrm{sign}(W s)$, W as in the energy, entries ±1.

    A field of exactly 0 keeps the neuron. Updating a single neuron never raises the energy; this update of all neurons
    may, and may cycle between two states.
    """
    xp, state, patterns = _state_and_patterns(state, patterns)
    field = _hebb_field(state, patterns)
    return xp.where(field == 0, state, xp.sign(field))


def modern_hopfield_energy(state: Array, patterns: Array, beta: float = 1.0) -> Array:
    r"""Return the energy of the modern network: the overlaps' free energy at temperature 1/β plus a quadratic well.

    $E = -\frac1\beta \log\sum_i e^{\beta x_i \cdot \xi} + \frac12 \xi\cdot\xi + \frac1\beta \log N + \frac12 M^2$ for N
    patterns, the longest of norm M (Ramsauer et al. 2020). In the convex hull of the patterns $0 \le E \le 2 M^2$.
    """
    xp, state, patterns = _state_and_patterns(state, patterns)
    _require_beta(beta)
    overlaps = _overlaps(state, patterns)
    well = (_squared_norm(state) + xp.max(_squared_norm(patterns), axis=-1)) / 2
    return free_energy(overlaps, temperature=1 / beta) + well + math.log(patterns.shape[-2]) / beta


def modern_hopfield_update(state: Array, patterns: Array, beta: float = 1.0) -> Array:
    r"""Take one retrieval step $\xi' = X^T \mathrm{softmax}(\beta X \xi)$; the rows of X are the patterns.

    It is attention with the patterns as keys and values. The result lies in their convex hull.
    """
    xp, state, patterns = _state_and_patterns(state, patterns)
    return xp.squeeze(attention_as_hopfield(state[..., None, :], patterns, patterns, beta), axis=-2)


def hopfield_retrieve(
    query: Array, patterns: Array, beta: float = 1.0, max_iterations: int = 10, tol: float = 1e-6
) -> Retrieval:
    r"""Repeat `modern_hopfield_update` until a step is no longer than `tol`, at most `max_iterations` times.

    A converged state is kept for the remaining iterations, so rows of a batch may converge at different times. The
    energy never rises along the trajectory.
    """
    xp, query, patterns = _state_and_patterns(query, patterns, name="query")
    require_count(1, max_iterations=max_iterations)
    leading = broadcast_batches(query=tuple(query.shape)[:-1], patterns=tuple(patterns.shape)[:-2])
    state = xp.broadcast_to(query, (*leading, query.shape[-1]))
    moving = xp.ones_like(state[..., 0], dtype=xp.bool)
    trajectory, moves = [state], [moving]
    for _ in range(max_iterations):
        updated = xp.where(moving[..., None], modern_hopfield_update(state, patterns, beta), state)
        moving = moving & (_squared_norm(updated - state) > tol**2)
        state = updated
        trajectory.append(state)
        moves.append(moving)
    visited = xp.stack(trajectory, axis=-2)
    energies = modern_hopfield_energy(visited, patterns[..., None, :, :], beta)
    num_iterations = xp.sum(xp.astype(xp.stack(moves[:-1]), xp.int32), axis=0, dtype=xp.int32)
    return Retrieval(state, visited, energies, num_iterations)


def attention_as_hopfield(queries: Array, keys: Array, values: Array, beta: float | None = None) -> Array:
    r"""Return $\mathrm{softmax}(\beta Q K^T) V$, retrieval by keys with separate values.

    With β = 1/√d, the default, this is scaled dot-product attention; with values equal to the keys it is one
    `modern_hopfield_update` of every query. Queries are (..., query, d), keys (..., key, d), values (..., key, width),
    the result (..., query, width).
    """
    xp, queries, keys, values = check_arrays(
        queries=(queries, "..., query, d"), keys=(keys, "..., key, d"), values=(values, "..., key, width")
    )
    beta = 1 / math.sqrt(max(queries.shape[-1], 1)) if beta is None else beta
    _require_beta(beta)
    overlaps = xp.matmul(queries, xp.matrix_transpose(keys))
    return xp.matmul(gibbs_distribution(overlaps, temperature=1 / beta), values)


def separation_quality(patterns: Array) -> Array:
    r"""Return each pattern's distance from the others, $\Delta_i = \min_{j \ne i} (x_i \cdot x_i - x_i \cdot x_j)$.

    Ramsauer et al. 2020, definition 2. A large value is easy to retrieve, 0 means a duplicate, and below 0 another
    pattern has a larger overlap. A single pattern has `inf`. The result is (..., num_patterns).
    """
    _, patterns = _patterns(patterns)
    xp, patterns, itself = unify(patterns=patterns, itself=np.eye(patterns.shape[-2], dtype=bool))
    rivals = xp.where(itself, -math.inf, xp.matmul(patterns, xp.matrix_transpose(patterns)))
    return _squared_norm(patterns) - xp.max(rivals, axis=-1)


def energy_landscape_1d(patterns: Array, axis: int = 0, n_points: int = 100, beta: float = 1.0) -> tuple[Array, Array]:
    """Compute the modern energy on the line through the patterns' mean, parallel to one coordinate axis.

    The line covers the patterns' range in that coordinate, or 1 if all patterns agree in it, and half of it more on
    each side. `axis` is from -d to d - 1.

    Returns:
        positions (..., n_points), the values of that coordinate; energies (..., n_points)
    """
    xp, patterns = _patterns(patterns)
    require_count(1, n_points=n_points)
    _require_index("axis", axis, patterns.shape[-1])
    _, _, along, fractions = unify(
        patterns=patterns, along=np.eye(patterns.shape[-1])[axis], fractions=np.linspace(-0.5, 1.5, n_points)
    )
    along, fractions = (xp.astype(constant, patterns.dtype) for constant in (along, fractions))
    lowest = xp.min(patterns[..., axis], axis=-1)[..., None]
    extent = xp.max(patterns[..., axis], axis=-1)[..., None] - lowest
    positions = lowest + xp.where(extent > 0, extent, xp.ones_like(extent)) * fractions
    mean = xp.mean(patterns, axis=-2)[..., None, :]
    states = mean * (1 - along) + positions[..., None] * along
    return positions, modern_hopfield_energy(states, patterns[..., None, :, :], beta)


def retrieval_basin(
    pattern_idx: int,
    patterns: Array,
    n_samples: int = 100,
    noise_scale: float = 0.5,
    beta: float = 1.0,
    key: Any = None,
) -> Array:
    """Return the fraction of noisy starts from which `hopfield_retrieve` recovers a pattern, (...).

    A start is the pattern plus normal noise of standard deviation `noise_scale` in every coordinate. It is
    recovered if it ends nearer to the pattern than half the distance from the pattern to the nearest other one. Of two
    equal patterns neither is ever recovered; a single pattern always is.

    `pattern_idx` is from -num_patterns to num_patterns - 1. `key` is a generator or key of any library; None is
    `numpy.random.default_rng(0)`, the same noise at every call.
    """
    xp, patterns = _patterns(patterns)
    require_count(1, n_samples=n_samples)
    _require_index("pattern_idx", pattern_idx, patterns.shape[-2])
    noise = normal(np.random.default_rng(0) if key is None else key, (n_samples, patterns.shape[-1]))
    noise = xp.astype(noise, patterns.dtype) if namespace_of(noise) is xp else noise
    xp, patterns, noise = unify(patterns=patterns, noise=noise)
    target = patterns[..., pattern_idx, :][..., None, :]
    final = hopfield_retrieve(target + noise_scale * noise, patterns[..., None, :, :], beta).state
    within = _squared_norm(final - target) < _squared_reach(patterns, pattern_idx)[..., None]
    return xp.mean(xp.astype(within, patterns.dtype), axis=-1)


def retrieval_success(
    key: Any, d: int, num_patterns: int, *, beta: float = 1.0, noise_scale: float = 0.5, num_trials: int = 100
) -> Array:
    """Measure the fraction of random patterns that are recovered from noise; `modern_capacity` is the theory.

    One set of patterns is drawn, uniform on the sphere of radius √d. Trial t starts at pattern t modulo `num_patterns`
    plus noise; recovery is defined as in `retrieval_basin`. The result is a number from 0 to 1, of the key's library.
    """
    require_count(1, d=d, num_patterns=num_patterns, num_trials=num_trials)
    pattern_key, noise_key = split(key, 2)
    directions = normal(pattern_key, (num_patterns, d))
    xp = namespace_of(directions)
    patterns = directions * xp.sqrt(d / _squared_norm(directions))[:, None]
    tried = range(min(num_trials, num_patterns))
    rounds = math.ceil(num_trials / num_patterns)
    targets = xp.tile(patterns, (rounds, 1))[:num_trials, :]
    reach = xp.tile(xp.stack([_squared_reach(patterns, index) for index in tried]), (rounds,))[:num_trials]
    final = hopfield_retrieve(targets + noise_scale * normal(noise_key, (num_trials, d)), patterns, beta).state
    return xp.mean(xp.astype(_squared_norm(final - targets) < reach, patterns.dtype))


def classical_capacity(N: float) -> float:
    r"""Return the number of random ±1 patterns that N classical neurons store, $0.138 N$ (Amit et al. 1985)."""
    require_positive(N=N)
    return 0.138 * N


def modern_capacity(d: int, epsilon: float = 0.01, *, beta: float = 1.0, K: float = 3.0) -> float:
    r"""Return the number of random patterns on a sphere that a modern network stores, not rounded, or `inf`.

    The lower bound of Ramsauer et al. 2020, theorem 3, for patterns of norm $K\sqrt{d-1}$:
    $N \ge \sqrt\epsilon\, c^{(d-1)/4}$ with $c = b / W_0(e^{a + \ln b})$, $b = \frac25 K^2 \beta$,
    $a = \frac{2}{d-1} (1 + \ln(2 \beta K^2 \epsilon (d-1)))$ and $W_0$ the upper branch of Lambert's function.
    The theorem requires $c \ge (2/\sqrt\epsilon)^{4/(d-1)}$, or N ≥ 2; a smaller result guarantees nothing.

    Args:
        d: Width of the patterns, at least 2.
        epsilon: Probability of failure, in (0, 1].
        beta: Inverse temperature; the defaults of beta and K are those of the paper's first example.
        K: Radius, above 0.
    """
    require_count(2, d=d)
    require_positive(beta=beta, K=K)
    if not 0 < epsilon <= 1:
        raise InputError("epsilon", expected="a probability in (0, 1]", got=epsilon)
    log_b = math.log(2 * K**2 * beta / 5)
    a = 2 / (d - 1) * (1 + math.log(2 * beta * K**2 * epsilon * (d - 1)))
    log_c = log_b - _log_lambert_w(a + log_b)
    exponent = math.log(epsilon) / 2 + (d - 1) / 4 * log_c
    return math.exp(exponent) if exponent < math.log(sys.float_info.max) else math.inf


def _log_lambert_w(y: float) -> float:
    """Return the logarithm u of $W_0(e^y)$: the root of $e^u + u = y$, by Newton's method from its right."""
    u = y if y <= 1 else math.log(y)
    for _ in range(50):
        u -= (math.exp(u) + u - y) / (math.exp(u) + 1)
    return u


def _state_and_patterns(state: Array, patterns: Array, *, name: str = "state") -> tuple[Namespace, Array, Array]:
    """Return the namespace and the two checked arrays; `name` is the name of the state in errors."""
    xp, state, patterns = check_arrays(**{name: (state, "..., d"), "patterns": (patterns, "..., num_patterns, d")})
    _patterns(patterns)
    return xp, state, patterns


def _patterns(patterns: Array) -> tuple[Namespace, Array]:
    xp, patterns = check_arrays(patterns=(patterns, "..., num_patterns, d"))
    if 0 in patterns.shape[-2:]:
        raise InputError("patterns", expected="at least one pattern of width 1 or more", got=tuple(patterns.shape))
    return xp, patterns


def _require_beta(beta: Array) -> None:
    if getattr(beta, "ndim", 0) != 0:
        raise InputError("beta", expected="one number", got=f"an array of shape {tuple(beta.shape)}")
    require_positive(beta=beta)


def _require_index(name: str, index: int, size: int) -> None:
    if not -size <= index < size:
        raise InputError(name, expected=f"from {-size} to {size - 1}", got=index)


def _overlaps(state: Array, patterns: Array) -> Array:
    xp = namespace_of(state, patterns)
    return xp.squeeze(xp.matmul(state[..., None, :], xp.matrix_transpose(patterns)), axis=-2)


def _hebb_field(state: Array, patterns: Array) -> Array:
    """Return the field W s times d: integers for entries of ±1, so that a field of 0 is exact."""
    xp = namespace_of(state, patterns)
    hebb = xp.squeeze(xp.matmul(_overlaps(state, patterns)[..., None, :], patterns), axis=-2)
    return hebb - state * xp.sum(patterns * patterns, axis=-2)


def _squared_norm(vectors: Array) -> Array:
    return namespace_of(vectors).sum(vectors * vectors, axis=-1)


def _squared_reach(patterns: Array, index: int) -> Array:
    """Return the square of half the distance from one pattern to the nearest other one; `inf` if there is none."""
    count = patterns.shape[-2]
    xp, patterns, itself = unify(patterns=patterns, itself=np.eye(count, dtype=bool)[index])
    squared = _squared_norm(patterns - patterns[..., index, :][..., None, :])
    return xp.min(xp.where(itself, math.inf, squared), axis=-1) / 4
