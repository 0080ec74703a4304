import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from errors import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tidegate.tensors.attention import attention_scores_with_metric
from tidegate.tensors.bilinear import (
    bilinear_form,
    bilinear_form_batch,
    diagonal_metric,
    euclidean_metric,
    inner_product,
    learned_metric,
    lower_index,
    metric_inverse,
    quadratic_form,
    raise_index,
    scaled_euclidean_metric,
    verify_metric_properties,
)

NAMESPACES = pytest.mark.parametrize(
    ("xp", "kind"), [(np, np.ndarray), (jnp, jax.Array), (torch, torch.Tensor)], ids=["numpy", "jax", "torch"]
)
unit = st.floats(-1, 1, width=32)
vectors = arrays(np.float64, (2, 3), elements=unit)
matrices = arrays(np.float64, (3, 3), elements=unit)
MINKOWSKI = np.diag([-1.0, 1.0, 1.0, 1.0])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def well_conditioned(W):
    return W.T @ W + np.eye(W.shape[-1])


# What hypothesis calls with many examples is defined here: JAX compiles a function once, but a new lambda each time.


def there_and_back(v, g):
    inverse = metric_inverse(g)
    return raise_index(lower_index(v, g), inverse), lower_index(raise_index(v, inverse), g)


def linear_forms(u, v, w, g, a, b):
    return [
        (bilinear_form(a * u + b * v, w, g), a * bilinear_form(u, w, g) + b * bilinear_form(v, w, g)),
        (bilinear_form(w, a * u + b * v, g), a * bilinear_form(w, u, g) + b * bilinear_form(w, v, g)),
    ]


def swapped_forms(u, v, g):
    return (
        bilinear_form(u, v, g),
        bilinear_form(v, u, g.T),
        bilinear_form(u, v, g + g.T),
        bilinear_form(v, u, g + g.T),
        quadratic_form(v, g),
        bilinear_form(v, v, g),
    )


def learned_length(W, v):
    return quadratic_form(v, learned_metric(W))


def inner_products(u, v):
    return inner_product(u, v, "euclidean"), inner_product(u, v)


@settings(max_examples=8)
@given(v=vectors, W=matrices)
def test_raising_and_lowering_undo_each_other(library, v, W):
    for back in library.call(there_and_back, v, well_conditioned(W)):
        assert_close(back, v)


@settings(max_examples=8)
@given(Q=vectors, K=matrices, W=matrices)
def test_the_product_of_a_query_with_a_lowered_key_is_the_score(library, Q, K, W):
    g = well_conditioned(W)
    assert_close(Q @ to_numpy(library.call(lower_index, K, g)).T, attention_scores_with_metric(Q, K, g))


@settings(max_examples=8)
@given(u=vectors, v=vectors, w=vectors, g=matrices, a=unit, b=unit)
def test_the_form_is_linear_in_each_argument(library, u, v, w, g, a, b):
    for left, right in library.call(linear_forms, u, v, w, g, np.asarray(a), np.asarray(b)):
        assert_close(left, right)


@settings(max_examples=8)
@given(u=vectors, v=vectors, g=matrices)
def test_swapping_the_arguments_transposes_the_metric(library, u, v, g):
    form, swapped, symmetric, symmetric_swapped, quadratic, of_itself = library.call(swapped_forms, u, v, g)
    assert_close(form, swapped)
    assert_close(symmetric, symmetric_swapped)
    assert_close(quadratic, of_itself)


@given(W=arrays(np.float64, (2, 3), elements=unit), v=vectors)
def test_a_learned_metric_measures_the_image(library, W, v):
    assert_close(library.call(learned_length, W, v), np.sum((v @ W.T) ** 2, axis=-1))


def test_a_learned_metric_is_semidefinite_and_definite_at_full_column_rank(library):
    thin = verify_metric_properties(library.call(learned_metric, normal(2, 3)))
    full = verify_metric_properties(library.call(learned_metric, normal(5, 3)))
    assert bool(thin["positive_semidefinite"])
    assert not bool(thin["positive_definite"])
    assert bool(full["positive_definite"])


def test_every_pair_of_the_batch_has_its_form(library):
    Q, K, g = normal(2, 4, 3), normal(2, 5, 3, seed=1), normal(3, 3, seed=2)
    scores = library.call(bilinear_form_batch, Q, K, g)
    pairs = np.array([[[q @ g @ k for k in K[b]] for q in Q[b]] for b in range(2)])
    assert isinstance(scores, library.kind)
    assert_close(scores, pairs)


@settings(max_examples=8)
@given(Q=matrices, K=matrices, g=matrices, W=matrices)
def test_scores_stay_when_basis_and_metric_turn_against_each_other(library, Q, K, g, W):
    basis = well_conditioned(W) @ np.triu(np.ones((3, 3)))
    inverse = np.linalg.inv(basis)
    turned = library.call(bilinear_form_batch, Q @ basis, K @ basis, inverse @ g @ inverse.T)
    assert_close(turned, Q @ g @ K.T)


@NAMESPACES
def test_the_scaled_metric_gives_the_scores_of_attention(xp, kind):
    metric = scaled_euclidean_metric(4, xp=xp)
    assert isinstance(metric, kind)
    assert_close(metric, np.eye(4) / 2)
    assert_close(scaled_euclidean_metric(4, 3.0, xp=xp), 3 * np.eye(4))
    assert_close(euclidean_metric(4, xp=xp), np.eye(4))


@settings(max_examples=8)
@given(u=vectors, v=vectors)
def test_inner_products_are_forms_in_the_metric_they_name(library, u, v):
    plain, scaled = library.call(inner_products, u, v)
    assert_close(plain, bilinear_form(u, v, euclidean_metric(3)))
    assert_close(scaled, bilinear_form(u, v, scaled_euclidean_metric(3)))


@given(weights=vectors)
def test_a_diagonal_metric_has_its_weights_and_nothing_else(library, weights):
    metric = to_numpy(library.call(diagonal_metric, weights))
    assert np.array_equal(metric, weights[..., None] * np.eye(3))


def test_half_precision_metrics_are_inverted_in_float32(library):
    g = np.diag([2.0, 4.0]).astype(np.float16)
    inverse = to_numpy(library.call(metric_inverse, g))
    assert inverse.dtype == np.float16
    assert np.array_equal(inverse, np.diag([0.5, 0.25]))


def test_an_indefinite_metric_has_an_inverse(library):
    assert_close(library.call(metric_inverse, MINKOWSKI), MINKOWSKI)
    assert_close(library.call(quadratic_form, np.array([2.0, 1.0, 0.0, 0.0]), MINKOWSKI), -3.0)


def test_the_inverse_is_symmetric_to_the_last_bit(library):
    inverse = to_numpy(library.call(metric_inverse, well_conditioned(normal(6, 6))))
    assert np.array_equal(inverse, inverse.T)


gradient_of_the_inverse = jax.jit(jax.grad(lambda g, cotangent: jnp.sum(metric_inverse(g) * cotangent)))


def inverse_gradients(g, cotangent):
    by_jax = gradient_of_the_inverse(g, cotangent)
    leaf = torch.tensor(g, requires_grad=True)
    (metric_inverse(leaf) * torch.from_numpy(cotangent)).sum().backward()
    return by_jax, leaf.grad


@pytest.mark.parametrize("g", [np.eye(3), well_conditioned(normal(3, 3))], ids=["equal eigenvalues", "generic"])
def test_the_gradient_of_the_inverse_is_minus_the_inverse_twice(g):
    cotangent = normal(3, 3, seed=1)
    inverse = np.linalg.inv(g)
    expected = -inverse @ (cotangent + cotangent.T) @ inverse / 2
    for gradient in inverse_gradients(g, cotangent):
        assert_close(gradient, expected, what="gradient")


def test_the_gradient_of_the_quadratic_form_is_twice_the_lowered_vector():
    v, g = normal(3), well_conditioned(normal(3, 3, seed=1))
    leaf = torch.tensor(v, requires_grad=True)
    quadratic_form(leaf, torch.from_numpy(g)).backward()
    expected = 2 * lower_index(v, g)
    assert_close(leaf.grad, expected, what="gradient")
    assert_close(jax.jit(jax.grad(quadratic_form))(v, g), expected, what="gradient")


def properties(library, g, **options):
    return {name: to_numpy(value) for name, value in library.call(verify_metric_properties, g, **options).items()}


def test_metrics_and_others_are_judged_in_a_batch(library):
    skew = np.array([[1.0, 0.5], [0.3, 1.0]])
    batch = np.stack([np.diag([3.0, 1.0]), skew, np.diag([1.0, -2.0]), np.diag([1.0, 0.0]), np.zeros((2, 2))])
    found = properties(library, batch)
    assert found["symmetric"].tolist() == [True, False, True, True, True]
    assert found["positive_definite"].tolist() == [True, False, False, False, False]
    assert found["positive_semidefinite"].tolist() == [True, False, False, True, True]
    assert_close(found["eigenvalues"][0], np.array([1.0, 3.0]))
    assert_close(found["max_asymmetry"], np.array([0, 0.2, 0, 0, 0]))
    assert_close(found["condition_number"][:3], np.array([3.0, 1.4 / 0.6, 2.0]))
    assert found["condition_number"][3:].tolist() == [np.inf, np.inf]


@given(exponent=st.integers(-12, 12))
def test_the_verdict_ignores_a_positive_factor(exponent):
    for g in (np.diag([1.0, 1e-3]), np.diag([1.0, -1e-3]), np.array([[1.0, 0.1], [0.0, 1.0]]), np.diag([1.0, 1e-7])):
        plain, scaled = verify_metric_properties(g), verify_metric_properties(g * 10.0**exponent)
        for name in ("symmetric", "positive_definite", "positive_semidefinite"):
            assert plain[name] == scaled[name], name


def test_the_tolerance_of_the_verdict_is_the_callers():
    g = np.array([[1.0, 0.1], [0.0, 1.0]])
    assert verify_metric_properties(g, tol=0.2)["symmetric"]
    assert not verify_metric_properties(np.eye(2), tol=1.0)["positive_definite"]


EAGER = pytest.mark.parametrize("array", [np.asarray, jnp.asarray, torch.tensor], ids=["numpy", "jax", "torch"])


@EAGER
def test_a_metric_that_is_not_symmetric_is_rejected(array):
    v, g = array([1.0, 2.0]), array([[1.0, 0.5], [0.0, 1.0]])
    with rejects("g", hint="|g - gᵀ| is 0.5"):
        lower_index(v, g)
    with rejects("g_inv"):
        raise_index(v, g)
    with rejects("g"):
        metric_inverse(g)
    with rejects("g"):
        lower_index(v, array(np.stack([np.eye(2), np.array([[1.0, 0.5], [0.0, 1.0]])])))


@EAGER
def test_a_singular_or_infinite_metric_has_no_inverse(array):
    for g in (np.diag([1.0, 0.0]), np.ones((2, 2)), np.zeros((2, 2)), normal(1, 3).T * normal(1, 3)):
        with rejects("g", hint="euclidean_metric"):
            metric_inverse(array(g))
    for value in (np.nan, np.inf):
        g = array([[1.0, value], [value, 1.0]])
        for function in (metric_inverse, verify_metric_properties, lambda g: lower_index(array([1.0, 2.0]), g)):
            with rejects("g"):
                function(g)


def test_values_are_not_checked_while_they_are_traced():
    skew = jnp.asarray([[1.0, 0.5], [0.0, 1.0]])
    assert_close(jax.jit(lower_index)(jnp.ones(2), skew), np.array([1.5, 1.0]))
    assert not np.isfinite(to_numpy(jax.jit(metric_inverse)(jnp.ones((2, 2))))).all()


def test_rounding_is_no_asymmetry(library):
    W = normal(400, 8).astype(np.float32)
    g = W.T @ W
    g[0, 1] = np.nextafter(g[0, 1], np.float32(np.inf))
    assert_close(library.call(lower_index, np.ones(8, np.float32), g), g.sum(axis=-1))
