import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import to_numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tidegate.tensors.masking import (
    apply_mask,
    attention_mask_from_padding,
    block_sparse_mask,
    causal_mask,
    causal_mask_with_window,
    causal_padding_mask,
    document_mask,
    global_local_mask,
    local_attention_mask,
    mask_to_additive,
    padding_mask,
    strided_attention_mask,
    visualize_mask,
)

EAGER = pytest.mark.parametrize("array", [np.asarray, jnp.asarray, torch.tensor], ids=["numpy", "jax", "torch"])
sizes = st.integers(1, 9)
lengths_up_to_five = arrays(np.int64, (2, 3), elements=st.integers(0, 5))


def where(n, rule):
    return np.array([[rule(i, j) for j in range(n)] for i in range(n)])


@given(n=sizes, k=sizes)
def test_each_pattern_is_its_rule(n, k):
    assert np.array_equal(causal_mask(n), where(n, lambda i, j: j <= i))
    assert np.array_equal(causal_mask_with_window(n, k), where(n, lambda i, j: 0 <= i - j < k))
    assert np.array_equal(local_attention_mask(n, k), where(n, lambda i, j: abs(i - j) <= k // 2))
    assert np.array_equal(strided_attention_mask(n, k), where(n, lambda i, j: (i - j) % k == 0))
    assert np.array_equal(block_sparse_mask(n, k), where(n, lambda i, j: i // k == j // k))


@given(n=sizes, window=sizes, tokens=st.sets(st.integers(0, 8)))
def test_global_tokens_see_all_and_are_seen_by_all(n, window, tokens):
    tokens = sorted(token for token in tokens if token < n)
    local = local_attention_mask(n, window)
    expected = where(n, lambda i, j: local[i, j] or i in tokens or j in tokens)
    assert np.array_equal(global_local_mask(n, window, tokens), expected)
    assert np.array_equal(global_local_mask(n, window, np.array(tokens, int)), expected)
    assert np.array_equal(global_local_mask(n, 1, n // 2), global_local_mask(n, 1, range(n // 2)))


@given(n=sizes, extra=st.integers(0, 3))
def test_the_limits_of_a_window(n, extra):
    assert np.array_equal(causal_mask_with_window(n, 1), np.eye(n, dtype=bool))
    assert np.array_equal(causal_mask_with_window(n, n + extra), causal_mask(n))
    assert local_attention_mask(n, 2 * n + extra).all()
    assert np.array_equal(local_attention_mask(n, 1), np.eye(n, dtype=bool))
    assert strided_attention_mask(n, 1).all()
    assert np.array_equal(block_sparse_mask(n, 1), np.eye(n, dtype=bool))


@pytest.mark.parametrize(
    ("xp", "kind"), [(np, np.ndarray), (jnp, jax.Array), (torch, torch.Tensor)], ids=["numpy", "jax", "torch"]
)
def test_patterns_are_bool_and_of_the_kind_asked_for(xp, kind):
    patterns = {
        causal_mask: (),
        causal_mask_with_window: (2,),
        local_attention_mask: (2,),
        strided_attention_mask: (3,),
        block_sparse_mask: (2,),
        global_local_mask: (1, [3]),
    }

    def all_of_them():
        return [function(7, *options, xp=xp) for function, options in patterns.items()]

    # Compiled at once, where each step of each pattern would be compiled alone.
    masks = jax.jit(all_of_them)() if xp is jnp else all_of_them()
    for mask, (function, options) in zip(masks, patterns.items(), strict=True):
        assert isinstance(mask, kind), function
        assert to_numpy(mask).dtype == np.bool_, function
        assert np.array_equal(to_numpy(mask), function(7, *options)), function


def paddings(lengths, keys):
    return padding_mask(lengths, 5), attention_mask_from_padding(lengths, keys, 5, 4), causal_padding_mask(lengths, 5)


@given(lengths=lengths_up_to_five, keys=arrays(np.int64, 3, elements=st.integers(0, 4)))
def test_padding_is_what_lies_beyond_the_length(library, lengths, keys):
    found = library.call(paddings, lengths, keys)
    assert all(isinstance(mask, library.kind) for mask in found)
    real, both, causal = map(to_numpy, found)
    assert real.dtype == np.bool_
    assert np.array_equal(real, np.arange(5) < lengths[..., None])
    assert np.array_equal(both, real[..., :, None] & (np.arange(4) < keys[..., None])[..., None, :])
    assert np.array_equal(causal, causal_mask(5) & real[..., :, None] & real[..., None, :])


def test_a_narrow_integer_counts_past_its_own_range(library):
    lengths = np.array([200, 7], np.uint8)
    assert to_numpy(library.call(padding_mask, lengths, 300)).sum(axis=-1).tolist() == [200, 7]


@given(
    queries=arrays(np.int64, (2, 3), elements=st.integers(0, 2)), keys=arrays(np.int32, 4, elements=st.integers(0, 2))
)
def test_documents_see_themselves_alone(library, queries, keys):
    mask = library.call(document_mask, queries, keys)
    assert isinstance(mask, library.kind)
    assert np.array_equal(to_numpy(mask), queries[:, :, None] == keys[None, None, :])


def masked_and_sevens(scores, mask):
    return apply_mask(scores, mask), apply_mask(scores, mask, 7.0)


@given(scores=arrays(np.float64, (2, 3, 4), elements=st.floats(-5, 5)), mask=arrays(np.bool_, (3, 4)))
def test_masked_scores_are_the_fill_and_the_others_untouched(library, scores, mask):
    masked, sevens = library.call(masked_and_sevens, scores, mask)
    assert isinstance(masked, library.kind)
    assert np.array_equal(to_numpy(masked), np.where(mask, scores, -1e9))
    assert np.array_equal(to_numpy(sevens), np.where(mask, scores, 7.0))


def additive_and_twos(mask):
    return mask_to_additive(mask), mask_to_additive(mask, -2.0)


@given(mask=arrays(np.bool_, (2, 3, 4)))
def test_adding_the_additive_mask_to_zeros_is_masking_them(library, mask):
    additive, twos = library.call(additive_and_twos, mask)
    assert isinstance(additive, library.kind)
    assert np.array_equal(to_numpy(additive), np.where(mask, 0.0, -1e9))
    assert np.array_equal(to_numpy(twos), np.where(mask, 0.0, -2.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_masking_keeps_the_dtype_and_stays_finite(library, dtype):
    masked = to_numpy(library.call(apply_mask, np.ones((2, 2), dtype), np.eye(2, dtype=bool)))
    assert masked.dtype == dtype
    assert masked[0, 1] == max(-1e9, float(np.finfo(dtype).min))


def test_an_infinite_fill_is_kept(library):
    masked = to_numpy(library.call(apply_mask, np.ones((2, 2)), np.eye(2, dtype=bool), -np.inf))
    assert masked.tolist() == [[1, -np.inf], [-np.inf, 1]]


@pytest.mark.parametrize(
    ("array", "dtype"), [(np.asarray, np.float32), (jnp.asarray, jnp.float32), (torch.tensor, torch.float32)]
)
def test_the_additive_mask_has_the_dtype_asked_for(array, dtype):
    assert mask_to_additive(array([[True, False]]), dtype=dtype).dtype == dtype


def test_masked_scores_have_no_gradient_whatever_they_are():
    scores = np.array([[1.0, np.nan], [np.inf, -np.inf]])
    mask = np.array([[True, False], [False, False]])
    by_jax = jax.grad(lambda scores: jnp.sum(apply_mask(scores, mask) ** 2))(jnp.asarray(scores))
    leaf = torch.tensor(scores, requires_grad=True)
    (apply_mask(leaf, mask) ** 2).sum().backward()
    for gradient in (by_jax, leaf.grad):
        assert to_numpy(gradient).tolist() == [[2.0, 0.0], [0.0, 0.0]]


@EAGER
def test_a_drawing_has_a_line_for_each_query(array):
    assert visualize_mask(array(causal_mask(3))) == "#..\n##.\n###"
    assert visualize_mask(array(np.stack([causal_mask(2), ~causal_mask(2)]))) == "#.\n##\n\n.#\n.."
    assert visualize_mask(array(np.zeros((0, 2, 2), bool))) == ""
