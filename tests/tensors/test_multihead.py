import math

import jax
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from libraries import LIBRARIES

from tidegate.tensors.attention import scaled_dot_product_attention
from tidegate.tensors.autodiff import gradients
from tidegate.tensors.multihead import (
    decompose_multihead,
    head_attention_entropy,
    head_diversity,
    init_multihead_weights,
    multihead_attention,
    multihead_attention_batched,
)
from tidegate.tensors.softmax import entropy, softmax_rows

BATCH, HEADS, QUERIES, KEYS, MODEL, KEY_WIDTH, VALUE_WIDTH = 2, 3, 4, 5, 6, 2, 3
RNG = np.random.default_rng(0)
Q = RNG.normal(size=(BATCH, QUERIES, MODEL))
K, V = RNG.normal(size=(2, BATCH, KEYS, MODEL))
W_Q, W_K = RNG.normal(size=(2, HEADS, MODEL, KEY_WIDTH))
W_V = RNG.normal(size=(HEADS, MODEL, VALUE_WIDTH))
W_O = RNG.normal(size=(HEADS, VALUE_WIDTH, MODEL))
WEIGHTS = (W_Q, W_K, W_V, W_O)
MASK = RNG.random((BATCH, HEADS, QUERIES, KEYS)) < 0.6
MASK[0, :, 1] = False
"""The second query of the first batch may see nothing."""

# Few examples, as each holds several rows.
few = settings(max_examples=6)
with_autodiff = pytest.mark.parametrize("library", LIBRARIES[1:], ids=lambda library: library.name)
inputs = hnp.arrays(np.float64, (BATCH, QUERIES, MODEL), elements=st.floats(-2, 2))
head_weights = hnp.arrays(np.float64, (2, HEADS, QUERIES, KEYS), elements=st.floats(-5, 5)).map(softmax_rows)


def by_heads(q, k, v, mask):
    """The sum over heads of single attention with projections."""
    heads = zip(*WEIGHTS, mask, strict=True)
    return sum(scaled_dot_product_attention(q @ wq, k @ wk, v @ wv, m) @ wo for wq, wk, wv, wo, m in heads)


@few
@given(q=inputs)
def test_several_heads_are_the_sum_of_single_attention_with_projections(library, q):
    output = library.call(multihead_attention, q, K, V, *WEIGHTS, MASK)
    assert_close(output, np.stack([by_heads(*one) for one in zip(q, K, V, MASK, strict=True)]))


@few
@given(order=st.permutations(range(HEADS)))
def test_the_order_of_heads_does_not_matter(library, order):
    permuted = library.call(multihead_attention, Q, K, V, *(w[order] for w in WEIGHTS), MASK[:, order])
    assert_close(permuted, multihead_attention(Q, K, V, *WEIGHTS, MASK))


def test_a_batch_is_a_loop(library):
    expected = np.stack([multihead_attention(*one, *WEIGHTS) for one in zip(Q, K, V, strict=True)])
    assert_close(library.call(multihead_attention_batched, Q, K, V, *WEIGHTS), expected)
    assert_close(multihead_attention_batched(Q[None], K[None], V[None], *WEIGHTS)[0], expected)


def test_masks_have_two_axes_or_all(library):
    some = [MASK[0, 0], MASK[:1], MASK[:, :1], MASK[..., :1]]
    found = library.call(lambda *masks: [multihead_attention_batched(Q, K, V, *WEIGHTS, mask) for mask in masks], *some)
    for mask, output in zip(some, found, strict=True):
        assert_close(output, multihead_attention(Q, K, V, *WEIGHTS, np.broadcast_to(mask, MASK.shape)))


def test_returned_weights_are_those_of_each_head(library):
    output, weights = library.call(multihead_attention, Q, K, V, *WEIGHTS, MASK, return_weights=True)
    for h in range(HEADS):
        arguments = Q @ W_Q[h], K @ W_K[h], V @ W_V[h], MASK[:, h]
        assert_close(weights[:, h], scaled_dot_product_attention(*arguments, return_weights=True)[1])
    assert_close(output, multihead_attention(Q, K, V, *WEIGHTS, MASK))
    # The second query of the first batch sees nothing.
    assert (to_numpy(output)[0, 1] == 0).all()
    assert (to_numpy(weights)[0, :, 1] == 0).all()


@with_autodiff
def test_a_query_that_sees_nothing_has_gradient_zero(library):
    def slopes(q, k, v, *weights):
        named = dict(zip(["Q", "K", "V", "W_Q", "W_K", "W_V", "W_O"], (q, k, v, *weights), strict=True))
        return gradients(lambda arrays: (multihead_attention(**arrays, mask=MASK) ** 2).sum(), named)

    found = {name: to_numpy(slope) for name, slope in library.call(slopes, Q, K, V, *WEIGHTS).items()}
    assert (found["Q"][0, 1] == 0).all()
    assert all(np.isfinite(slope).all() and (slope != 0).any() for slope in found.values())


def test_the_decomposition_holds_every_step(library):
    steps = library.call(decompose_multihead, Q, K, V, *WEIGHTS)
    output, weights = multihead_attention(Q, K, V, *WEIGHTS, return_weights=True)
    expected = {
        "Q_heads": np.einsum("btd,hdk->bhtk", Q, W_Q),
        "K_heads": np.einsum("btd,hdk->bhtk", K, W_K),
        "V_heads": np.einsum("btd,hdk->bhtk", V, W_V),
        "weights": weights,
        "output": output,
        "head_diversity": head_diversity(weights),
        "head_entropy": head_attention_entropy(weights),
    }
    expected["scores"] = expected["Q_heads"] @ np.swapaxes(expected["K_heads"], -1, -2) / math.sqrt(KEY_WIDTH)
    expected["head_outputs"] = weights @ expected["V_heads"]
    assert set(steps) == set(expected)
    for name, value in expected.items():
        assert_close(steps[name], value)


@few
@given(weights=head_weights)
def test_diversity_is_one_minus_the_mean_cosine_similarity_of_pairs(library, weights):
    flat = weights.reshape(2, HEADS, -1)
    unit = flat / np.linalg.norm(flat, axis=-1, keepdims=True)
    pairs = [(unit[:, a] * unit[:, b]).sum(-1) for a in range(HEADS) for b in range(a)]
    assert_close(library.call(head_diversity, weights), 1 - np.mean(pairs, axis=0))


def test_diversity_of_identical_disjoint_and_blank_heads(library):
    """A blank head, one without weight, resembles other blank heads only."""
    weights = softmax_rows(RNG.normal(size=(QUERIES, KEYS)))
    blank, first, second = np.zeros((3, QUERIES, KEYS))
    first[:, 0], second[:, 1] = 1, 1
    cases = {
        0.0: ([weights] * 4, [weights], [blank, blank]),
        1.0: ([first, second], [blank, weights]),
        2 / 3: ([blank, blank, weights],),
    }
    heads = [np.stack(heads) for several in cases.values() for heads in several]
    found = library.call(lambda *each: [head_diversity(one) for one in each], *heads)
    expected = [diversity for diversity, several in cases.items() for _ in several]
    for one, diversity in zip(found, expected, strict=True):
        assert_close(one, np.asarray(diversity))


@with_autodiff
def test_diversity_has_finite_gradients_at_heads_without_weight(library):
    weights = np.stack([np.zeros((QUERIES, KEYS)), *softmax_rows(RNG.normal(size=(2, QUERIES, KEYS)))])
    slopes = to_numpy(
        library.call(lambda a: gradients(lambda named: head_diversity(named["A"]), {"A": a})["A"], weights)
    )
    assert np.isfinite(slopes).all()
    assert (slopes[1:] != 0).any()


@few
@given(weights=head_weights)
def test_head_entropy_is_the_mean_over_queries(library, weights):
    expected = np.array([[np.mean([entropy(row) for row in head]) for head in batch] for batch in weights])
    assert_close(library.call(head_attention_entropy, weights), expected)


KEYS_OF_RANDOMNESS = {
    np.ndarray: lambda: np.random.default_rng(7),
    jax.Array: lambda: jax.random.key(7),
    torch.Tensor: lambda: torch.Generator().manual_seed(7),
}


@pytest.mark.parametrize("kind", KEYS_OF_RANDOMNESS)
def test_initial_weights_are_glorot_normal(kind):
    d_model, num_heads, d_k, d_v = 64, 8, 48, 32
    weights = init_multihead_weights(KEYS_OF_RANDOMNESS[kind](), d_model, num_heads, d_k, d_v)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shapes == {
        "W_Q": (num_heads, d_model, d_k),
        "W_K": (num_heads, d_model, d_k),
        "W_V": (num_heads, d_model, d_v),
        "W_O": (num_heads, d_v, d_model),
    }
    fans = {"W_Q": d_model + d_k, "W_K": d_model + d_k, "W_V": d_model + d_v, "W_O": num_heads * d_v + d_model}
    for name, weight in weights.items():
        assert isinstance(weight, kind)
        standard = to_numpy(weight) / math.sqrt(2 / fans[name])
        # Five standard errors of the mean and of the variance of as many standard normal numbers.
        assert abs(standard.mean()) < 5 / math.sqrt(standard.size)
        assert abs(standard.var() - 1) < 5 * math.sqrt(2 / standard.size)
    assert not np.array_equal(to_numpy(weights["W_Q"]), to_numpy(weights["W_K"]))
    again = init_multihead_weights(KEYS_OF_RANDOMNESS[kind](), d_model, num_heads, d_k, d_v)
    assert all(np.array_equal(to_numpy(weight), to_numpy(again[name])) for name, weight in weights.items())
