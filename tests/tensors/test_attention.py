import math

import numpy as np
import pytest
from closeness import assert_close, to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from libraries import LIBRARIES

from tidegate.tensors.activations import activate
from tidegate.tensors.attention import (
    attention_scores,
    attention_scores_with_metric,
    attention_weights,
    batched_attention,
    bilinear_attention,
    decompose_attention,
    scaled_dot_product_attention,
)
from tidegate.tensors.autodiff import gradients
from tidegate.tensors.softmax import gibbs_distribution, log_partition, partition_function

BATCH, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 3, 5, 4, 6
RNG = np.random.default_rng(0)
Q = RNG.normal(size=(BATCH, QUERIES, WIDTH))
K = RNG.normal(size=(BATCH, KEYS, WIDTH))
V = RNG.normal(size=(BATCH, KEYS, VALUE_WIDTH))
METRIC = RNG.normal(size=(WIDTH, WIDTH))
MASK = RNG.random((BATCH, QUERIES, KEYS)) < 0.6
MASK[0, 1] = False
"""The second query of the first batch may see nothing."""

# Few examples, as each holds several rows.
few = settings(max_examples=6)
finite = st.floats(-3, 3)
queries = hnp.arrays(np.float64, Q.shape, elements=finite)
keys = hnp.arrays(np.float64, K.shape, elements=finite)
values = hnp.arrays(np.float64, V.shape, elements=finite)
masks = hnp.arrays(bool, MASK.shape)
with_autodiff = pytest.mark.parametrize("library", LIBRARIES[1:], ids=lambda library: library.name)


def by_loops(q, k, v, mask, temperature=1.0):
    """Attention of one batch, written out position by position."""
    output = np.zeros((len(q), v.shape[-1]))
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if mask[i, j]]
        factors = [math.exp(float(q[i] @ k[j]) / math.sqrt(q.shape[-1]) / temperature) for j in seen]
        for factor, j in zip(factors, seen, strict=True):
            output[i] += factor / sum(factors) * v[j]
    return output


@few
@given(q=queries, k=keys, v=values, mask=masks, temperature=st.floats(0.3, 3))
def test_attention_equals_its_formula_written_out(library, q, k, v, mask, temperature):
    # An array, which JAX traces: each number would compile again.
    output, weights = library.call(
        scaled_dot_product_attention, q, k, v, mask, np.asarray(temperature), return_weights=True
    )
    assert_close(output, np.stack([by_loops(*one, temperature) for one in zip(q, k, v, mask, strict=True)]))
    assert_close(to_numpy(weights).sum(-1), mask.any(-1).astype(float))
    assert (to_numpy(weights)[~mask] == 0).all()
    assert (to_numpy(output)[~mask.any(-1)] == 0).all()


@few
@given(q=queries, k=keys, v=values)
def test_outputs_lie_in_the_convex_hull_of_the_values(library, q, k, v):
    directions = np.random.default_rng(1).normal(size=(VALUE_WIDTH, 50))
    along = to_numpy(library.call(scaled_dot_product_attention, q, k, v)) @ directions
    offered = v @ directions
    assert_close(np.clip(along, offered.min(1, keepdims=True), offered.max(1, keepdims=True)), along)


@few
@given(q=queries, k=keys, v=values, mask=masks, order=st.permutations(range(KEYS)))
def test_the_order_of_keys_does_not_matter(library, q, k, v, mask, order):
    permuted = library.call(scaled_dot_product_attention, q, k[:, order], v[:, order], mask[..., order])
    assert_close(permuted, scaled_dot_product_attention(q, k, v, mask))


@few
@given(q=queries, k=keys, v=values)
def test_attention_is_a_mean_of_the_first_key_and_of_attention_to_the_others(library, q, k, v):
    def both(q, k, v):
        mass = attention_weights(attention_scores(q, k))[..., :1]
        others = log_partition(attention_scores(q, k[:, 1:]))
        odds = activate("sigmoid", attention_scores(q, k)[..., 0] - others)
        rest = scaled_dot_product_attention(q, k[:, 1:], v[:, 1:])
        return scaled_dot_product_attention(q, k, v), mass * v[:, :1] + (1 - mass) * rest, mass[..., 0], odds

    output, mean, mass, odds = library.call(both, q, k, v)
    assert_close(output, mean)
    assert_close(mass, odds)


@few
@given(q=queries, k=keys, v=values, order=st.permutations(range(QUERIES)))
def test_permuted_queries_get_permuted_outputs(library, q, k, v, order):
    assert_close(
        library.call(scaled_dot_product_attention, q[:, order], k, v), scaled_dot_product_attention(q, k, v)[:, order]
    )


def weights_of(q, k):
    return attention_weights(attention_scores(q, k))


@few
@given(q=queries, k=keys, shift=hnp.arrays(np.float64, WIDTH, elements=finite))
def test_weights_ignore_a_shift_of_all_keys(library, q, k, shift):
    assert_close(library.call(weights_of, q, k + shift), weights_of(q, k))


def test_temperature_limits_are_the_best_key_and_the_mean_of_all(library):
    def limits(q, k, v):
        return [scaled_dot_product_attention(q, k, v, temperature=temperature) for temperature in (1e-5, 1e15)]

    cold, hot = library.call(limits, Q, K, V)
    best = np.argmax(Q @ np.swapaxes(K, 1, 2), axis=-1)
    assert_close(cold, np.take_along_axis(V, best[..., None], axis=1))
    assert_close(hot, np.broadcast_to(V.mean(1, keepdims=True), hot.shape))


def test_scores_are_scaled_by_the_root_of_the_width(library):
    products = np.einsum("bia,bja->bij", Q, K)
    scaled, plain = library.call(lambda q, k: (attention_scores(q, k), attention_scores(q, k, scale=False)), Q, K)
    assert_close(scaled, products / 2)
    assert_close(plain, products)


def test_nothing_scores_zero_and_gives_zero(library):
    def both(wide, long, q, k, v):
        return attention_scores(wide, long), scaled_dot_product_attention(q, k, v)

    scores, output = library.call(both, np.ones((2, 0)), np.ones((3, 0)), Q, K[:, :0], V[:, :0])
    assert_close(scores, np.zeros((2, 3)))
    assert_close(output, np.zeros((BATCH, QUERIES, VALUE_WIDTH)))


def test_scores_with_the_scaled_identity_as_metric_are_the_scaled_scores(library):
    def both(q, k, v, g, mask):
        return attention_scores_with_metric(q, k, g), bilinear_attention(q, k, v, g, mask, 0.7)

    scores, output = library.call(both, Q, K, V, np.eye(WIDTH) / math.sqrt(WIDTH), MASK)
    assert_close(scores, attention_scores(Q, K))
    assert_close(output, scaled_dot_product_attention(Q, K, V, MASK, 0.7))


def test_a_metric_acts_like_a_map_on_the_queries(library):
    output, weights = library.call(bilinear_attention, Q, K, V, METRIC, MASK, 0.7, return_weights=True)
    expected = gibbs_distribution(np.einsum("bia,ac,bjc->bij", Q, METRIC, K), 0.7, MASK)
    assert_close(weights, expected)
    assert_close(output, expected @ V)


def test_a_batch_is_a_loop(library):
    expected = np.stack([scaled_dot_product_attention(*one) for one in zip(Q, K, V, MASK, strict=True)])
    assert_close(library.call(batched_attention, Q, K, V, MASK), expected)
    assert_close(batched_attention(Q[None], K[None], V[None], MASK[None])[0], expected)


def test_leading_axes_broadcast(library):
    output = library.call(scaled_dot_product_attention, Q[:, None], K[0], V[:1, None], MASK[0])
    assert_close(output[:, 0], np.stack([scaled_dot_product_attention(q, K[0], V[0], MASK[0]) for q in Q]))


@with_autodiff
def test_a_query_that_sees_nothing_has_gradient_zero(library):
    def slopes(q, k, v, mask):
        def loss(named):
            return (scaled_dot_product_attention(named["Q"], named["K"], named["V"], mask) ** 2).sum()

        return gradients(loss, {"Q": q, "K": k, "V": v})

    masked = library.call(slopes, Q, K, V, MASK)
    without = library.call(slopes, Q[:1, ::2], K[:1], V[:1], MASK[:1, ::2])
    assert (to_numpy(masked["Q"])[0, 1] == 0).all()
    assert (to_numpy(masked["Q"])[0, 0] != 0).any()
    assert_close(masked["Q"][:1, ::2], without["Q"], what="gradient")
    assert_close(masked["K"][:1], without["K"], what="gradient")
    assert_close(masked["V"][:1], without["V"], what="gradient")


def test_the_decomposition_holds_every_step(library):
    steps = library.call(decompose_attention, Q, K, V)
    assert set(steps) == {"scores_raw", "scores", "weights", "output", "partition", "scale"}
    assert float(steps["scale"]) == 1 / math.sqrt(WIDTH)
    assert_close(steps["scores_raw"], attention_scores(Q, K, scale=False))
    assert_close(steps["scores"], attention_scores(Q, K))
    assert_close(steps["partition"], partition_function(attention_scores(Q, K)))
    assert_close(
        to_numpy(steps["weights"]) * to_numpy(steps["partition"])[..., None], np.exp(to_numpy(steps["scores"]))
    )
    assert_close(steps["output"], scaled_dot_product_attention(Q, K, V))
