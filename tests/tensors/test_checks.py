import jax
import numpy as np
import pytest
import torch
from errors import rejects

from tidegate.tensors._checks import (
    broadcast_batches,
    check_arrays,
    is_false,
    require_count,
    require_head_mask,
    require_mask,
    require_positive,
    require_rank,
    require_same_shape,
)


def zeros(*shape):
    return np.zeros(shape)


def run(library, check, *arrays):
    """Call a check with arrays of this library."""
    library.call(lambda *own: check(*own) or own[0], *arrays)


def check_scores(Q, K, mask=None):
    check_arrays(Q=(Q, "..., query, width"), K=(K, "..., key, width"), bias=(mask, "key"))


@pytest.mark.parametrize(
    ("Q", "K", "field"),
    [
        (zeros(3), zeros(5, 4), "Q"),
        (zeros(3, 4), zeros(5, 6), "K"),
        (zeros(2, 3, 4), zeros(6, 5, 4), "K"),
        (zeros(2, 3, 4), zeros(6, 3, 5, 4), "K"),
    ],
)
def test_arrays_must_have_their_axes_share_sizes_and_broadcast(library, Q, K, field):
    for good in ((zeros(3, 4), zeros(5, 4)), (zeros(2, 3, 4), zeros(5, 4)), (zeros(2, 1, 3, 4), zeros(6, 5, 4))):
        run(library, check_scores, *good)
    with rejects(field):
        run(library, check_scores, Q, K)
    run(library, lambda Q, K, bias: check_scores(Q, K, bias), zeros(3, 4), zeros(5, 4), zeros(5))
    for bias in (zeros(4), zeros(2, 5)):
        with rejects("bias"):
            run(library, lambda Q, K, bias: check_scores(Q, K, bias), zeros(3, 4), zeros(5, 4), bias)


def test_arrays_must_be_of_real_floats(library):
    for dtype in (int, bool):
        with pytest.raises(TypeError, match=r"^K must have a real floating dtype, got .*(int64|bool)"):
            run(library, check_scores, zeros(3, 4), np.ones((5, 4), dtype))


def test_axes_without_dots_are_all_there_are():
    require_rank("query, width", Q=zeros(2, 3), K=None)
    for shape in ((3,), (4, 2, 3)):
        with rejects("Q"):
            require_rank("query, width", Q=zeros(*shape))
    require_same_shape(K=zeros(2, 3), Q=zeros(2, 3))
    with rejects("Q"):
        require_same_shape(K=zeros(2, 3), Q=zeros(3, 2))


@pytest.mark.parametrize(
    ("shapes", "together"),
    [
        (((2,), (2,)), (2,)),
        (((1,), (6, 2)), (6, 2)),
        (((), ()), ()),
        (((0,), (1,)), (0,)),
    ],
)
def test_leading_axes_broadcast_to_what_they_give_together(shapes, together):
    assert broadcast_batches(Q=shapes[0], K=shapes[1]) == together


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (2, 3, 4), (1, 1, 1)])
def test_a_mask_may_broadcast_to_the_scores(shape):
    require_mask(np.ones(shape, bool), (2, 3, 4))
    require_mask(None, (2, 3, 4))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 3, 4), (1, 2, 3, 4), (2, 4)])
def test_a_mask_of_another_shape_is_rejected(library, shape):
    with rejects("mask"):
        run(library, lambda mask: require_mask(mask, (2, 3, 4)), np.ones(shape, bool))


def test_a_mask_of_heads_has_two_axes_or_all():
    require_head_mask(np.ones((3, 4), bool), (2, 5, 3, 4))
    require_head_mask(np.ones((2, 1, 3, 4), bool), (2, 5, 3, 4))
    with rejects("mask", hint="mask[..., None, :, :]"):
        require_head_mask(np.ones((2, 3, 4), bool), (2, 5, 3, 4))


def test_a_mask_of_numbers_is_rejected_with_the_remedy(library):
    with pytest.raises(TypeError, match=r"^mask must be bool.* got (torch\.)?int64\. Compare it, as in mask != 0\."):
        run(library, lambda mask: require_mask(mask, (3, 4)), np.ones((3, 4), int))


def test_positive_values_pass_and_traced_ones_too(library):
    run(library, lambda T: require_positive(temperature=T, other=0.5), np.array([1e-9, 2.0]))
    for value in (0, -1.0, float("nan")):
        with rejects("temperature"):
            require_positive(temperature=value)
    if library.jitted:
        run(library, lambda T: require_positive(temperature=T), np.array([0.0]))
    else:
        with rejects("temperature"):
            run(library, lambda T: require_positive(temperature=T), np.array([1.0, 0.0]))


def test_counts_are_integers_that_are_large_enough():
    require_count(1, n=1, m=np.int64(3))
    require_count(0, n=0)
    with rejects("n"):
        require_count(1, n=0)
    for value in (1.0, True, "3", None):
        with pytest.raises(TypeError, match=r"^n must be an integer"):
            require_count(1, n=value)


def test_a_condition_is_false_only_if_it_is_known_to_be():
    assert is_false(False)
    assert is_false(np.array([True, False]))
    assert not is_false(True)
    assert not is_false(np.array([True, True]))
    assert not is_false(torch.zeros(2, device="meta") > 0)
    seen = []
    jax.jit(lambda x: seen.append(is_false(x > 0)) or x)(np.zeros(2))
    assert seen == [False]
