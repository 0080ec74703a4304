import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from hypothesis import given, settings
from scipy.special import lambertw, logsumexp, softmax

from tidegate.tensors.attention import scaled_dot_product_attention
from tidegate.tensors.hopfield import (
    attention_as_hopfield,
    classical_capacity,
    classical_hopfield_energy,
    classical_hopfield_update,
    energy_landscape_1d,
    hopfield_retrieve,
    modern_capacity,
    modern_hopfield_energy,
    modern_hopfield_update,
    retrieval_basin,
    retrieval_success,
    separation_quality,
)

RNG = np.random.default_rng(5)
PATTERNS = RNG.normal(size=(6, 4))
STATE = RNG.normal(size=4)
STATES = RNG.normal(size=(3, 4))
# Six patterns of norm 4, any two of them orthogonal or opposite.
APART = 4.0 * np.concatenate([np.eye(4)[:3], -np.eye(4)[:3]])

entries = st.floats(-3, 3, width=64).map(lambda x: round(x, 3))
# Eager JAX compiles for every new shape and jitted JAX for every call: few examples, several states in each, one shape.
few = settings(max_examples=4)
states_drawn = hnp.arrays(np.float64, (3, 4), elements=entries)
patterns_drawn = hnp.arrays(np.float64, (6, 4), elements=entries)
# Arrays, which JAX traces: each number would compile again.
betas = st.sampled_from([0.1, 1.0, 7.0]).map(np.asarray)
signs = st.sampled_from([-1.0, 1.0])
sign_states = hnp.arrays(np.float64, (3, 4), elements=signs)
sign_patterns = hnp.arrays(np.float64, (6, 4), elements=signs)


def hebb_weights(patterns):
    weights = patterns.T @ patterns / patterns.shape[1]
    return weights - np.diag(np.diag(weights))


# --- the classical network


def classical(states, patterns):
    return classical_hopfield_energy(states, patterns), classical_hopfield_update(states, patterns)


@few
@given(states=sign_states, patterns=sign_patterns)
def test_the_classical_network_has_hebb_weights(library, states, patterns):
    """Its energy is their quadratic form, and its update the sign of the field; no field keeps the state."""
    energy, update = library.call(classical, states, patterns)
    assert_close(energy, np.asarray([-state @ hebb_weights(patterns) @ state / 2 for state in states]))
    field = np.round(4 * states @ hebb_weights(patterns))
    np.testing.assert_array_equal(to_numpy(update), np.where(field == 0, states, np.sign(field)))


@given(states=sign_states, patterns=sign_patterns, neuron=st.integers(0, 3))
def test_turning_one_neuron_never_raises_the_classical_energy(states, patterns, neuron):
    turned = states.copy()
    turned[:, neuron] = classical_hopfield_update(states, patterns)[:, neuron]
    before, after = (classical_hopfield_energy(s, patterns) for s in (states, turned))
    assert_close(np.minimum(before, after), after)


# --- the modern network


def energy_and_update(states, patterns, beta):
    return modern_hopfield_energy(states, patterns, beta), modern_hopfield_update(states, patterns, beta)


@few
@given(states=states_drawn, patterns=patterns_drawn, beta=betas)
def test_modern_energy_is_ramsauers_and_the_update_a_softmax_mean_of_the_patterns(library, states, patterns, beta):
    energy, update = library.call(energy_and_update, states, patterns, beta)
    free = -logsumexp(beta * states @ patterns.T, axis=1) / beta
    well = (np.sum(states**2, axis=1) + np.max(np.sum(patterns**2, axis=1))) / 2
    assert_close(energy, free + well + math.log(6) / beta)
    assert_close(update, softmax(beta * states @ patterns.T, axis=1) @ patterns)


@given(patterns=patterns_drawn, mixture=hnp.arrays(np.float64, (6,), elements=st.floats(0.01, 1)), beta=betas)
def test_energy_in_the_convex_hull_lies_between_zero_and_twice_the_largest_squared_norm(patterns, mixture, beta):
    energy = modern_hopfield_energy(mixture / mixture.sum() @ patterns, patterns, beta)
    largest = np.max(np.sum(patterns**2, axis=1))
    assert_close(np.clip(energy, 0, 2 * largest), np.asarray(energy))


@few
@given(queries=states_drawn, patterns=patterns_drawn, beta=betas)
def test_energy_never_rises_along_retrieval(library, queries, patterns, beta):
    energies = to_numpy(library.call(hopfield_retrieve, queries, patterns, beta, 4).energies)
    assert_close(np.minimum.accumulate(energies, axis=-1), energies)


@given(seed=st.integers(0, 2**32), grid=st.sampled_from([1.0, 0.001]), beta=st.floats(0.01, 20))
def test_energy_never_rises_along_a_long_retrieval(seed, grid, beta):
    # Ten sets of patterns with three queries each; on the coarse grid some are equal, opposite or zero.
    rng = np.random.default_rng(seed)
    queries, patterns = (grid * np.round(rng.uniform(-3, 3, shape) / grid) for shape in ((10, 3, 4), (10, 1, 6, 4)))
    energies = hopfield_retrieve(queries, patterns, beta, 30).energies
    assert energies.shape == (10, 3, 31)
    assert_close(np.minimum.accumulate(energies, axis=-1), energies)


@given(queries=states_drawn, patterns=patterns_drawn, beta=betas)
def test_a_step_lowers_the_energy_by_at_least_half_its_square(queries, patterns, beta):
    found = modern_hopfield_update(queries, patterns, beta)
    before, after = (modern_hopfield_energy(states, patterns, beta) for states in (queries, found))
    bound = before - np.sum((found - queries) ** 2, axis=-1) / 2
    assert_close(np.minimum(after, bound), after)


@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_the_update_is_the_state_minus_the_gradient_of_the_energy(beta):
    states = torch.tensor(STATES, requires_grad=True)
    modern_hopfield_energy(states, PATTERNS, beta).sum().backward()
    assert_close(modern_hopfield_update(STATES, PATTERNS, beta), STATES - to_numpy(states.grad), what="gradient")


def test_retrieval_follows_the_update_and_its_energies_are_those_of_the_trajectory(library):
    found = library.call(hopfield_retrieve, STATES, PATTERNS, 0.7, 4, 1e-30)
    state = STATES
    for step in range(5):
        assert_close(found.trajectory[:, step, :], state)
        assert_close(found.energies[:, step], modern_hopfield_energy(state, PATTERNS, 0.7))
        state = modern_hopfield_update(state, PATTERNS, 0.7)
    np.testing.assert_array_equal(to_numpy(found.state), to_numpy(found.trajectory)[:, -1])
    np.testing.assert_array_equal(to_numpy(found.num_iterations), [4, 4, 4])


def test_a_state_at_rest_stays_while_others_move(library):
    queries = np.stack([APART[1], np.asarray([2.1, 2.0, 0.0, 0.0]), APART[5]])
    found = library.call(hopfield_retrieve, queries, APART, 1.0, 8, 1e-3)
    still, moving, _ = to_numpy(found.num_iterations)
    assert still == 1
    assert 1 < moving < 8
    trajectory = to_numpy(found.trajectory)
    assert (trajectory[0, 1:] == trajectory[0, 1]).all()
    assert (trajectory[1, moving:] == trajectory[1, moving]).all()
    assert (trajectory[1, moving] != trajectory[1, moving - 1]).any()


def test_one_query_is_retrieved_from_each_batch_of_patterns(library):
    patterns = RNG.normal(size=(2, 6, 4))
    found = library.call(hopfield_retrieve, STATE, patterns, 1.0, 3)
    assert tuple(found.trajectory.shape) == (2, 4, 4)
    for i in range(2):
        assert_close(found.state[i], hopfield_retrieve(STATE, patterns[i], 1.0, 3).state)


# --- attention


def both_steps(queries, keys, values):
    return attention_as_hopfield(queries, keys, values), attention_as_hopfield(queries, keys, keys, 0.8)


@few
@given(queries=states_drawn, keys=patterns_drawn, values=patterns_drawn)
def test_attention_is_one_retrieval_step(library, queries, keys, values):
    attended, retrieved = library.call(both_steps, queries, keys, values)
    assert_close(attended, scaled_dot_product_attention(queries, keys, values))
    assert_close(retrieved, modern_hopfield_update(queries, keys, 0.8))


# --- gradients


def scalar_energy_of_the_result(query, patterns):
    found = hopfield_retrieve(query, patterns, 1.0, 3)
    return (found.state**2).sum() + found.energies.sum()


by_jax = jax.jit(jax.grad(scalar_energy_of_the_result, argnums=(0, 1)))


@pytest.mark.parametrize("query", [STATE, PATTERNS[0], np.zeros(4)], ids=["generic", "at a pattern", "zero"])
def test_jax_and_torch_agree_on_the_gradient_through_retrieval(query):
    expected = by_jax(query, PATTERNS)
    leaves = [torch.tensor(array, requires_grad=True) for array in (query, PATTERNS)]
    scalar_energy_of_the_result(*leaves).backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert np.isfinite(to_numpy(gradient)).all()
        assert_close(leaf.grad, gradient, what="gradient")


def test_separation_is_the_smallest_gap_in_overlap(library):
    def each(patterns, several):
        return separation_quality(patterns), separation_quality(several), separation_quality(patterns[:1])

    gram = PATTERNS @ PATTERNS.T
    expected = np.asarray([min(gram[i, i] - gram[i, j] for j in range(6) if j != i) for i in range(6)])
    found, batched, single = library.call(each, PATTERNS, np.stack([PATTERNS, 2 * PATTERNS]))
    assert_close(found, expected)
    assert_close(batched, np.stack([expected, 4 * expected]))
    assert to_numpy(single) == math.inf


def test_an_infinite_separation_has_a_finite_gradient():
    gradient = jax.jit(jax.grad(lambda patterns: separation_quality(patterns).sum()))(PATTERNS[:1])
    assert_close(gradient, 2 * PATTERNS[:1], what="gradient")
    leaf = torch.tensor(PATTERNS[:1], requires_grad=True)
    separation_quality(leaf).sum().backward()
    assert_close(leaf.grad, 2 * PATTERNS[:1], what="gradient")


# --- capacity and separation


def test_classical_capacity_is_0_138_of_the_neurons():
    assert classical_capacity(1000) == 138.0
    assert_close(separation_quality(np.stack([STATE, STATE])), np.zeros(2))


@pytest.mark.parametrize(
    ("d", "K", "c"), [(20, 3.0, 3.1546), (75, 1.0, 1.3718)], ids=["first example", "second example"]
)
def test_modern_capacity_meets_the_papers_examples(d, K, c):
    capacity = modern_capacity(d, 0.001, K=K)
    base = (capacity / math.sqrt(0.001)) ** (4 / (d - 1))
    assert math.floor(base * 1e4) / 1e4 == c


@given(
    d=st.integers(2, 200),
    epsilon=st.sampled_from([1e-6, 0.01, 1.0]),
    beta=st.sampled_from([0.01, 1.0, 30.0]),
    K=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_modern_capacity_is_the_theorem_with_lamberts_function(d, epsilon, beta, K):
    a, b = 2 / (d - 1) * (1 + math.log(2 * beta * K**2 * epsilon * (d - 1))), 2 * K**2 * beta / 5
    c = b / lambertw(math.exp(a) * b).real
    expected = 0.5 * math.log(epsilon) + (d - 1) / 4 * math.log(c)
    assert_close(np.asarray(math.log(modern_capacity(d, epsilon, beta=beta, K=K))), np.asarray(expected))


def test_a_capacity_beyond_the_largest_float_is_infinite():
    assert modern_capacity(100_000) == math.inf


# --- landscapes and basins


def test_the_landscape_is_the_energy_on_a_line_through_the_mean(library):
    def both(patterns, equal):
        return energy_landscape_1d(patterns, 2, 9, 0.5), energy_landscape_1d(equal, -1, 9)

    (positions, energies), (wide, flat) = library.call(both, PATTERNS, np.zeros((2, 6, 4)))
    low, high = PATTERNS[:, 2].min(), PATTERNS[:, 2].max()
    expected = np.linspace(low - (high - low) / 2, high + (high - low) / 2, 9)
    assert_close(positions, expected)
    states = np.tile(PATTERNS.mean(axis=0), (9, 1))
    states[:, 2] = expected
    assert_close(energies, modern_hopfield_energy(states, PATTERNS, 0.5))
    # Equal coordinates have a range of 1, in all batches.
    assert_close(wide, np.tile(np.linspace(-0.5, 1.5, 9), (2, 1)))
    assert tuple(flat.shape) == (2, 9)


def test_the_basin_is_the_share_of_starts_that_end_within_half_the_gap(library):
    noise = np.random.default_rng(0).standard_normal((9, 4))
    final = hopfield_retrieve(PATTERNS[-2] + 1.5 * noise, PATTERNS, 1.3).state
    gap = min(np.linalg.norm(PATTERNS[-2] - other) for other in np.delete(PATTERNS, -2, axis=0))
    expected = np.mean(np.linalg.norm(final - PATTERNS[-2], axis=1) < gap / 2)
    assert 0 < expected < 1
    batched = library.call(retrieval_basin, -2, np.stack([PATTERNS, PATTERNS]), 9, 1.5, 1.3)
    assert_close(batched, np.asarray([expected, expected]))
    assert_close(retrieval_basin(-2, PATTERNS, 9, 1.5, 1.3), np.asarray(expected))


def test_twins_are_never_retrieved_and_an_only_pattern_always():
    assert retrieval_basin(0, np.stack([STATE, STATE, -STATE]), beta=20.0) == 0
    assert retrieval_basin(0, STATE[None, :], noise_scale=100.0) == 1


@pytest.mark.parametrize(
    "key",
    [np.random.default_rng(3), jax.random.key(3), jax.random.PRNGKey(3), torch.Generator().manual_seed(3)],
    ids=["numpy", "jax", "jax, raw", "torch"],
)
def test_keys_of_each_library_give_their_kind_of_noise(key):
    def measure(key):
        return retrieval_basin(0, PATTERNS, 9, key=key), retrieval_success(key, 32, 6, num_trials=9)

    basin, success = (jax.jit(measure) if isinstance(key, jax.Array) else measure)(key)
    assert 0 <= float(basin) <= 1
    assert float(success) == 1


def test_the_key_decides_the_noise_and_the_callers_dtype_stays():
    patterns = jnp.asarray(PATTERNS, dtype=jnp.float32)
    basin = jax.jit(lambda key: retrieval_basin(0, patterns, 9, 1.5, 1.3, key=key))
    shares = [basin(jax.random.key(seed)) for seed in range(3)]
    assert all(share.dtype == jnp.float32 for share in shares)
    assert len({float(share) for share in shares}) > 1


def test_success_falls_with_the_number_of_patterns_and_rises_with_width():
    def success(d, count):
        return float(retrieval_success(np.random.default_rng(0), d, count, beta=0.25))

    assert success(16, 4) == 1 > success(16, 8) > success(16, 64) == 0
    assert success(32, 64) == 1
    assert success(32, 64) > classical_capacity(32) / 64


def test_more_patterns_than_trials_and_fewer_are_both_measured():
    assert retrieval_success(np.random.default_rng(0), 32, 50, num_trials=7) == 1
    assert retrieval_success(np.random.default_rng(0), 32, 3, num_trials=7, noise_scale=100.0) < 1
