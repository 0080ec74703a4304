import jax
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from libraries import LIBRARIES, TORCH

from tidegate.tensors.autodiff import gradients
from tidegate.tensors.softmax import entropy, free_energy, gibbs_distribution, log_partition, softmax_rows
from tidegate.tensors.thermodynamics import (
    entropy_from_log_partition,
    fisher_metric,
    heat_capacity,
    internal_energy,
    mean_score,
    natural_gradient,
)

SHAPE = (2, 3, 4)
# Few examples, as each holds several rows.
few = settings(max_examples=6)
score_rows = hnp.arrays(np.float64, SHAPE, elements=st.floats(-10, 10))
masks = hnp.arrays(bool, SHAPE)
# Arrays, which JAX traces: each number would compile again.
temperatures = st.floats(0.5, 10).map(np.asarray)
with_autodiff = pytest.mark.parametrize("library", LIBRARIES[1:], ids=lambda library: library.name)

RNG = np.random.default_rng(0)
SCORES, GRADIENT = RNG.normal(size=SHAPE), RNG.normal(size=SHAPE)
EDGES = np.array([[1.0, -2.0, 0.5], [0.3, -np.inf, 0.1], [-np.inf, -np.inf, -np.inf], [4.0, 5.0, 6.0]])
EDGES_MASK = np.array([[True, True, False], [True, True, True], [True, True, True], [False, False, False]])


def gradient(library, function, *arrays):
    """Gradient of the sum of what the function returns, in its first argument."""

    def differentiate(first, *rest):
        return gradients(lambda named: function(named["first"], *rest).sum(), {"first": first})["first"]

    return library.call(differentiate, *arrays)


def both_free_energies(scores, temperature, mask):
    disorder = entropy(gibbs_distribution(scores, temperature, mask), eps=1e-300)
    energy = internal_energy(scores, temperature, mask)
    return energy - temperature * disorder, free_energy(scores, temperature, mask=mask)


@few
@given(scores=score_rows, mask=masks, temperature=temperatures)
def test_free_energy_is_internal_energy_less_temperature_times_entropy(library, scores, mask, temperature):
    mask = mask | ~mask.any(-1, keepdims=True)
    assert_close(*library.call(both_free_energies, scores, temperature, mask))


def from_log_partition(scores, temperature, mask):
    partition, mean = log_partition(scores, temperature, mask), mean_score(scores, temperature, mask)
    return entropy_from_log_partition(partition, mean, temperature)


@few
@given(scores=score_rows, mask=masks, temperature=temperatures)
def test_entropy_from_the_log_partition_equals_entropy_from_the_weights(library, scores, mask, temperature):
    expected = entropy(gibbs_distribution(scores, temperature, mask), eps=1e-300)
    assert_close(library.call(from_log_partition, scores, temperature, mask), expected)


def moments(scores, temperature, mask):
    return tuple(moment(scores, temperature, mask) for moment in (mean_score, internal_energy, heat_capacity))


@few
@given(scores=score_rows, mask=masks, temperature=temperatures)
def test_mean_score_and_heat_capacity_are_moments_of_the_weights(library, scores, mask, temperature):
    weights = gibbs_distribution(scores, temperature, mask)
    mean = (weights * scores).sum(-1)
    variance = (weights * (scores - mean[..., None]) ** 2).sum(-1)
    for actual, expected in zip(
        library.call(moments, scores, temperature, mask), (mean, -mean, variance / temperature**2), strict=True
    ):
        assert_close(actual, expected)


@with_autodiff
def test_heat_capacity_is_the_slope_of_internal_energy(library):
    temperature = np.array([[[0.5], [1.0], [3.0]], [[0.7], [2.0], [9.0]]])
    slopes = gradient(library, lambda t: internal_energy(library.array(SCORES), t), temperature)
    assert_close(to_numpy(slopes)[..., 0], library.call(heat_capacity, SCORES, temperature), what="gradient")


@with_autodiff
def test_entropy_is_minus_the_slope_of_free_energy(library):
    slope = gradient(library, lambda t: free_energy(library.array(SCORES[0, 0]), t), np.array([0.7]))
    assert_close(slope, -entropy(gibbs_distribution(SCORES[0, :1], 0.7)), what="gradient")


def test_empty_rows_have_mean_heat_capacity_and_entropy_zero(library):
    for moment in library.call(moments, EDGES, np.asarray(0.7), EDGES_MASK):
        assert (to_numpy(moment)[2:] == 0).all()
    disorder = library.call(entropy_from_log_partition, np.array([-np.inf, 1.0]), np.array([0.0, 0.25]))
    assert_close(disorder, np.array([0.0, 0.75]))


@with_autodiff
@pytest.mark.parametrize("function", [mean_score, internal_energy, heat_capacity])
def test_gradients_are_zero_where_a_state_does_not_count(library, function):
    slopes = to_numpy(gradient(library, lambda scores, mask: function(scores, 0.7, mask), EDGES, EDGES_MASK))
    counts = EDGES_MASK & np.isfinite(EDGES)
    counts[3] = False
    assert np.isfinite(slopes).all()
    assert (slopes[~counts] == 0).all()
    assert (slopes[counts] != 0).all()


@with_autodiff
def test_gradient_of_entropy_from_an_empty_row_is_zero(library):
    partition, mean = np.array([-np.inf, 1.0]), np.array([0.0, 0.25])
    assert_close(gradient(library, entropy_from_log_partition, partition, mean), np.array([0.0, 1.0]), what="gradient")
    slopes = gradient(library, lambda m, p: entropy_from_log_partition(p, m, 0.5), mean, partition)
    assert_close(slopes, np.array([0.0, -2.0]), what="gradient")


def test_states_far_below_the_peak_do_not_spoil_the_moments(library):
    scores = np.array([0.0, 1.0, np.finfo(np.float32).min], dtype=np.float32)
    capacity, mean = library.call(lambda x: (heat_capacity(x), mean_score(x)), scores)
    assert_close(capacity, heat_capacity(np.array([0.0, 1.0])), dtype="float32")
    assert_close(mean, mean_score(np.array([0.0, 1.0])), dtype="float32")


@with_autodiff
def test_fisher_metric_is_the_hessian_of_the_log_partition(library):
    row, by = SCORES[0, 0], torch.func if library is TORCH else jax
    hessian = by.jacrev(by.jacrev(log_partition))
    assert_close(library.call(fisher_metric, softmax_rows(row)), library.call(hessian, row), what="gradient")


def test_fisher_metric_is_the_covariance_of_the_score_function(library):
    weights = softmax_rows(SCORES[0, 0])
    # Row j: the gradient of log p_j in the natural parameters.
    slopes = np.eye(4) - weights
    assert_close(library.call(fisher_metric, weights), np.einsum("j,ja,jb->ab", weights, slopes, slopes))


@few
@given(scores=hnp.arrays(np.float64, SHAPE, elements=st.floats(-3, 3)), mask=masks)
def test_fisher_metric_times_natural_gradient_is_the_gradient_on_the_tangent_space(library, scores, mask):
    weights = gibbs_distribution(scores, 1.0, mask)
    count = np.maximum(mask.sum(-1, keepdims=True), 1)
    tangent = np.where(mask, GRADIENT - (GRADIENT * mask).sum(-1, keepdims=True) / count, 0)
    solution = to_numpy(library.call(natural_gradient, GRADIENT, weights))
    assert_close(np.einsum("...ij,...j->...i", fisher_metric(weights), solution), tangent)
    assert (solution[~mask] == 0).all()
    assert_close(solution - mask * solution.sum(-1, keepdims=True) / count, solution)


def test_natural_gradient_is_the_pseudo_inverse_of_the_metric_applied(library):
    weights = gibbs_distribution(SCORES, 1.0, np.array([True, True, False, True]))
    expected = np.einsum("...ij,...j->...i", np.linalg.pinv(fisher_metric(weights)), GRADIENT)
    assert_close(library.call(natural_gradient, GRADIENT, weights), expected)


def test_natural_gradient_without_a_tangent_is_zero(library):
    weights = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert (to_numpy(library.call(natural_gradient, np.array([1.0, 2.0, 4.0]), weights)) == 0).all()


@with_autodiff
def test_natural_gradient_has_finite_slopes_at_zero_weight(library):
    weights = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    slopes = to_numpy(gradient(library, lambda p, g: natural_gradient(g, p) ** 2, weights, GRADIENT[0, :2, :3]))
    assert np.isfinite(slopes).all()
    assert (slopes[weights == 0] == 0).all()
    assert (slopes[0, :2] != 0).all()


def test_entropy_takes_a_temperature_for_each_row(library):
    temperature = np.array([[0.5, 1.0, 3.0], [0.7, 2.0, 9.0]])
    partition, mean = log_partition(SCORES, temperature[..., None]), mean_score(SCORES, temperature[..., None])
    expected = entropy(gibbs_distribution(SCORES, temperature[..., None]))
    assert_close(library.call(entropy_from_log_partition, partition, mean, temperature), expected)
