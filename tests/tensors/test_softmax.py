import math

import jax
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from libraries import JAX, LIBRARIES, NUMPY, TORCH

from tidegate.tensors.autodiff import gradients
from tidegate.tensors.softmax import (
    attention_entropy,
    effective_number_of_states,
    entropy,
    free_energy,
    gibbs_distribution,
    log_partition,
    log_softmax,
    max_entropy,
    normalized_entropy,
    partition_function,
    softmax_jacobian,
    softmax_jacobian_batched,
    softmax_rows,
    temperature_sweep,
)

SHAPE = (2, 3, 4)
# Few examples, as each holds several rows.
few = settings(max_examples=6)
score_rows = hnp.arrays(np.float64, SHAPE, elements=st.floats(-30, 30))
masks = hnp.arrays(bool, SHAPE)
# Arrays, which JAX traces: each number would compile again.
temperatures = st.floats(0.1, 10).map(np.asarray)
with_autodiff = pytest.mark.parametrize("library", LIBRARIES[1:], ids=lambda library: library.name)

SCORES = np.random.default_rng(0).normal(size=SHAPE)
EDGES = np.array([[1.0, -2.0, 0.5], [0.3, -np.inf, 0.1], [-np.inf, -np.inf, -np.inf], [4.0, 5.0, 6.0]])
"""An ordinary row, one with a state at -inf, one that is all -inf, and one that EDGES_MASK empties."""
EDGES_MASK = np.array([[True, True, False], [True, True, True], [True, True, True], [False, False, False]])


def gradient(library, function, *arrays):
    """Gradient of the sum of what the function returns, in its first argument."""

    def differentiate(first, *rest):
        return gradients(lambda named: function(named["first"], *rest).sum(), {"first": first})["first"]

    return library.call(differentiate, *arrays)


def jacobian(library, function, array):
    return library.call((torch.func if library is TORCH else jax).jacrev(function), array)


@few
@given(scores=score_rows, shift=st.floats(-100, 100), temperature=temperatures)
def test_weights_ignore_a_constant_shift(library, scores, shift, temperature):
    shifted = library.call(gibbs_distribution, scores + shift, temperature)
    assert_close(shifted, gibbs_distribution(scores, temperature))


@few
@given(scores=score_rows, mask=masks, order=st.permutations(range(SHAPE[-1])))
def test_permuted_states_get_permuted_weights(library, scores, mask, order):
    permuted = library.call(gibbs_distribution, scores[..., order], 0.7, mask[..., order])
    assert_close(permuted, gibbs_distribution(scores, 0.7, mask)[..., order])


@few
@given(scores=score_rows, mask=masks, temperature=temperatures)
def test_weights_have_the_ratio_of_their_boltzmann_factors_and_sum_to_one(library, scores, mask, temperature):
    factors = np.exp(scores / temperature - 300 / temperature) * mask
    total = factors.sum(-1, keepdims=True)
    expected = np.divide(factors, total, out=np.zeros(SHAPE), where=total > 0)
    reachable = (total > 1e-290) | ~mask.any(-1, keepdims=True)
    actual = to_numpy(library.call(gibbs_distribution, scores, temperature, mask))
    assert_close(np.where(reachable, actual, 0), np.where(reachable, expected, 0))
    assert_close(actual.sum(-1), mask.any(-1).astype(float))
    assert (actual >= 0).all()
    assert (actual[~mask] == 0).all()


def test_temperature_limits_are_the_argmax_shared_among_ties_and_uniform(library):
    scores = np.array([[0.0, 3.0, 2.0, 1.0], [2.0, 1.0, 2.0, 0.0]])
    assert_close(library.call(gibbs_distribution, scores, 1e-3), np.array([[0, 1.0, 0, 0], [0.5, 0, 0.5, 0]]))
    assert_close(library.call(gibbs_distribution, scores, 1e15), np.full((2, 4), 1 / 4))


def test_huge_scores_and_tiny_temperatures_do_not_overflow(library):
    def edges(scores, huge):
        return gibbs_distribution(scores, 2.0**-7), log_partition(huge, 1e-2), free_energy(-huge[:1])

    weights, logarithm, free = library.call(
        edges, np.array([2.0**14, 2.0**14 - 2.0**-7, -(2.0**14)]), np.array([1e300, 0.0])
    )
    assert_close(weights, np.array([math.e, 1, 0]) / (math.e + 1))
    assert_close(logarithm, np.array(1e302))
    assert_close(free, np.array(1e300))


def test_a_temperature_for_each_row(library):
    temperature = np.array([[0.5], [1.0], [3.0]])

    def both(scores, temperature):
        return [function(scores, temperature) for function in (gibbs_distribution, free_energy)]

    rows = [both(SCORES[:, row], float(temperature[row, 0])) for row in range(3)]
    for found, expected in zip(library.call(both, SCORES, temperature), zip(*rows, strict=True), strict=True):
        assert_close(found, np.stack(expected, axis=1))
    assert_close(library.call(gibbs_distribution, SCORES, np.asarray(0.5)), gibbs_distribution(SCORES, 0.5))


@with_autodiff
def test_weights_are_differentiable_in_the_temperature(library):
    weights = gibbs_distribution(SCORES, 0.7)
    mean = (weights * SCORES).sum(-1, keepdims=True)
    derivative = jacobian(library, lambda t: gibbs_distribution(library.array(SCORES), t), np.array([0.7]))
    assert_close(derivative[..., 0], -weights * (SCORES - mean) / 0.7**2, what="gradient")


def test_masks_broadcast_to_the_scores(library):
    for mask in (np.array([True, False, True, True]), np.array([[True], [False], [True]])):
        full = np.broadcast_to(mask, SHAPE)
        assert_close(library.call(gibbs_distribution, SCORES, 1.0, mask), gibbs_distribution(SCORES, 1.0, full))


def test_a_masked_state_is_as_good_as_absent(library):
    mask = np.array([True, False, True, True])
    functions = (log_partition, partition_function, free_energy)

    def all_of_them(scores, mask):
        return gibbs_distribution(scores, 0.7, mask), [function(scores, 0.7, mask=mask) for function in functions]

    weights, others = library.call(all_of_them, SCORES, mask)
    assert_close(to_numpy(weights)[..., mask], gibbs_distribution(SCORES[..., mask], 0.7))
    for function, found in zip(functions, others, strict=True):
        assert_close(found, function(SCORES[..., mask], 0.7))


def test_empty_rows_have_weight_zero_and_log_partition_minus_infinity(library):
    functions = {gibbs_distribution: 0, log_partition: -np.inf, partition_function: 0, free_energy: np.inf}

    def all_of_them(scores, mask):
        return [function(scores, mask=mask) for function in functions], log_softmax(scores)

    results, logarithms = library.call(all_of_them, EDGES, EDGES_MASK)
    for result, expected in zip(results, functions.values(), strict=True):
        assert (to_numpy(result)[2:] == expected).all()
    assert (to_numpy(logarithms)[2] == -np.inf).all()
    finite = np.where(np.isinf(EDGES), 0.0, EDGES)
    assert_close(results[0], gibbs_distribution(finite, mask=EDGES_MASK & np.isfinite(EDGES)))


def test_rows_without_any_state_are_empty(library):
    weights, logarithm = library.call(lambda e: (gibbs_distribution(e), log_partition(e)), np.zeros((2, 0)))
    assert weights.shape == (2, 0)
    assert (to_numpy(logarithm) == -np.inf).all()


@with_autodiff
@pytest.mark.parametrize("function", [gibbs_distribution, log_partition, partition_function, free_energy, log_softmax])
def test_gradients_are_zero_where_a_state_does_not_count(library, function):
    def weighted(scores, mask):
        values = function(scores) if function is log_softmax else function(scores, mask=mask)
        # The slopes differ from entry to entry, so that nothing cancels in a row of weights.
        return values * values if function is gibbs_distribution else values

    mask = np.ones(EDGES.shape, dtype=bool) if function is log_softmax else EDGES_MASK
    slopes = to_numpy(gradient(library, weighted, EDGES, mask))
    counts = mask & np.isfinite(EDGES)
    assert np.isfinite(slopes).all()
    assert (slopes[~counts] == 0).all()
    assert (slopes[counts][:4] != 0).all()


@with_autodiff
@pytest.mark.parametrize("function", [gibbs_distribution, free_energy])
def test_empty_rows_leave_the_temperature_gradient_finite(library, function):
    def squares(temperature, scores):
        values = function(scores, temperature)[:2]
        return values * values

    slope = to_numpy(gradient(library, squares, np.array([0.7]), EDGES[:3]))
    assert_close(slope, gradient(library, squares, np.array([0.7]), EDGES[:2]), what="gradient")
    assert (slope != 0).all()


def test_nan_and_plus_infinity_are_not_hidden(library):
    scores = np.array([[np.nan, 1.0], [0.0, 1.0]])
    assert np.isnan(to_numpy(library.call(gibbs_distribution, scores))).tolist() == [[True, True], [False, False]]
    with np.errstate(invalid="ignore"):
        assert np.isnan(to_numpy(library.call(gibbs_distribution, np.array([np.inf, 0.0])))).any()


@with_autodiff
def test_gradient_of_log_partition_is_the_weights_over_the_temperature(library):
    slopes = gradient(library, lambda scores: log_partition(scores, 0.7), SCORES)
    assert_close(slopes, gibbs_distribution(SCORES, 0.7) / 0.7, what="gradient")


def partitions(scores, temperature):
    return tuple(function(scores, temperature) for function in (log_partition, partition_function, free_energy))


@few
@given(scores=score_rows, temperature=temperatures)
def test_partition_function_and_free_energy_follow_from_their_definitions(library, scores, temperature):
    logarithm, total, free = library.call(partitions, scores, temperature)
    expected = np.exp(scores / temperature).sum(-1)
    assert_close(logarithm, np.log(expected))
    assert_close(to_numpy(total) / expected, np.ones(SHAPE[:-1]))
    assert_close(free, -temperature * np.log(expected))


def softmax_and_its_logarithm(scores):
    return softmax_rows(scores), log_softmax(scores)


@few
@given(scores=score_rows)
def test_softmax_is_the_gibbs_distribution_at_temperature_one(library, scores):
    weights, logarithms = library.call(softmax_and_its_logarithm, scores)
    assert_close(weights, gibbs_distribution(scores, 1.0))
    assert_close(np.exp(to_numpy(logarithms)), weights)


def test_log_softmax_survives_where_the_weight_underflows(library):
    assert_close(library.call(log_softmax, np.array([0.0, -2000.0])), np.array([0.0, -2000.0]))


def test_temperature_sweep_stacks_single_temperatures(library):
    several = np.array([0.5, 1.0, 4.0])
    swept = library.call(temperature_sweep, SCORES, several)
    assert_close(swept, np.stack([gibbs_distribution(SCORES, float(one)) for one in several]))


def entropies(weights):
    return tuple(function(weights) for function in (attention_entropy, normalized_entropy, effective_number_of_states))


@few
@given(scores=score_rows)
def test_entropy_lies_between_zero_and_its_maximum(library, scores):
    values, shares, numbers = map(to_numpy, library.call(entropies, gibbs_distribution(scores)))
    assert_close(np.clip(values, 0, max_entropy(SHAPE[-1])), values)
    assert_close(shares, values / math.log(SHAPE[-1]))
    assert_close(numbers, np.exp(values))


def test_equal_weights_have_the_largest_entropy(library):
    for num_states in (1, 2, 7):
        spread, share, number = library.call(entropies, np.full((3, num_states), 1 / num_states))
        assert_close(spread, np.full(3, max_entropy(num_states)))
        assert_close(number, np.full(3, float(num_states)))
        assert_close(share, np.full(3, float(num_states > 1)))


def test_one_state_alone_and_empty_rows_have_entropy_zero(library):
    spread, share, number = library.call(entropies, np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert (to_numpy(spread) == 0).all()
    assert (to_numpy(share) == 0).all()
    assert to_numpy(number).tolist() == [1, 0]


def test_eps_bounds_the_logarithm(library):
    assert_close(library.call(entropy, np.array([0.001, 0.999]), 0.01), -0.001 * np.log(0.01) - 0.999 * np.log(0.999))


@with_autodiff
def test_gradient_of_entropy_is_finite_at_zero_weight(library):
    weights = np.array([[0.0, 0.25, 0.75], [0.0, 0.0, 0.0]])
    expected = np.where(weights > 0, -np.log(np.maximum(weights, 1e-12)) - 1, -np.log(1e-12))
    assert_close(gradient(library, entropy, weights), expected, what="gradient")
    through = gradient(library, lambda scores, mask: entropy(gibbs_distribution(scores, 1.0, mask)), EDGES, EDGES_MASK)
    assert np.isfinite(to_numpy(through)).all()
    assert (to_numpy(through)[2:] == 0).all()
    slopes = gradient(library, effective_number_of_states, weights)
    assert np.isfinite(to_numpy(slopes)).all()
    assert (to_numpy(slopes)[1] == 0).all()


@with_autodiff
def test_jacobian_equals_that_of_automatic_differentiation(library):
    row = SCORES[0, 0]
    expected = jacobian(library, softmax_rows, row)
    assert_close(library.call(softmax_jacobian, softmax_rows(row)), expected, what="gradient")


@few
@given(scores=score_rows)
def test_jacobian_is_symmetric_and_kills_constants(library, scores):
    matrices = to_numpy(library.call(softmax_jacobian, gibbs_distribution(scores)))
    assert_close(matrices, np.swapaxes(matrices, -1, -2))
    assert_close(matrices.sum(-1), np.zeros(SHAPE))


def test_batched_jacobian_is_a_loop_over_rows(library):
    weights = softmax_rows(SCORES)
    expected = np.stack([[softmax_jacobian(row) for row in rows] for rows in weights])
    assert_close(library.call(softmax_jacobian_batched, weights), expected)
    assert_close(softmax_jacobian(weights), expected)


@pytest.mark.parametrize("library", [NUMPY, JAX], ids=lambda library: library.name)
def test_half_precision_sums_in_single_precision(library):
    scores = np.zeros(4096, dtype=np.float16)
    weights = library.call(gibbs_distribution, scores)
    assert to_numpy(weights).dtype == np.float16
    # The sum of 4096 weights, each 2^-12, is exact in float32; float16 could not even count so far one by one.
    assert float(to_numpy(library.call(partition_function, scores))) == 4096
    assert_close(library.call(entropy, weights), np.float16(math.log(4096)), dtype="float32")


def test_bfloat16_stays_bfloat16():
    scores = torch.tensor(SCORES, dtype=torch.bfloat16)
    for function in (gibbs_distribution, log_partition, free_energy, entropy, softmax_jacobian):
        assert function(scores.abs()).dtype == torch.bfloat16
    expected = gibbs_distribution(scores.to(torch.float32)).to(torch.bfloat16)
    assert torch.equal(gibbs_distribution(scores), expected)
