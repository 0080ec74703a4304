import re

import jax
import numpy as np
import pytest
import torch

from tidegate.tensors._checks import (
    is_false,
    require_batches_broadcast,
    require_count,
    require_equal,
    require_floating,
    require_mask,
    require_positive,
    require_rank,
)


def exactly(message):
    # JAX adds a line of its own to what is raised under jit.
    return rf"^{re.escape(message)}(\n|$)"


def zeros(*shape):
    return np.zeros(shape)


def passes(library, check, *arrays):
    """Whether a check lets arrays of this library pass; a checker returns None."""
    return library.call(lambda *own: check(*own) or own[0], *arrays) is not None


def test_floating_dtypes_pass_and_others_are_named(library):
    assert passes(library, lambda Q: require_floating(Q=Q, K=None), zeros(2))
    for dtype, shown in (("int64", "int64"), ("bool", "bool")):
        message = rf"^Q must have a real floating dtype; got (torch\.)?{shown}\. Convert it to float32 or float64\."
        with pytest.raises(TypeError, match=message):
            passes(library, lambda Q: require_floating(Q=Q), np.ones(2, dtype))


def test_a_rank_is_a_minimum_unless_it_is_exact(library):
    assert passes(library, lambda Q: require_rank("query, width", Q=Q, K=None), zeros(2, 3))
    assert passes(library, lambda Q: require_rank("query, width", Q=Q), zeros(4, 2, 3))
    assert passes(library, lambda Q: require_rank("query, width", exact=True, Q=Q), zeros(2, 3))
    with pytest.raises(ValueError, match=exactly("Q must have shape (..., query, width); got (3,).")):
        passes(library, lambda Q: require_rank("query, width", Q=Q), zeros(3))
    for shape in ((3,), (4, 2, 3)):
        with pytest.raises(ValueError, match=exactly(f"Q must have shape (query, width); got {shape}.")):
            passes(library, lambda Q: require_rank("query, width", exact=True, Q=Q), zeros(*shape))


def test_sizes_that_differ_are_listed():
    require_equal("width", Q=3, K=3)
    require_equal("shape", Q=(3, 2), K=(3, 2))
    with pytest.raises(ValueError, match=exactly("Q and K and V must have the same width; Q has 3, K has 4, V has 3.")):
        require_equal("width", Q=3, K=4, V=3)


@pytest.mark.parametrize(
    ("shapes", "together"),
    [
        (((2, 3, 4), (2, 5, 4)), (2,)),
        (((3, 4), (2, 5, 4)), (2,)),
        (((1, 3, 4), (6, 2, 5, 4)), (6, 2)),
        (((3, 4), (5, 4)), ()),
        (((1, 3, 4), (1, 5, 4)), (1,)),
        (((0, 3, 4), (1, 5, 4)), (0,)),
    ],
)
def test_leading_axes_broadcast_to_what_they_give_together(library, shapes, together):
    found = []
    arrays = [np.zeros(shape) for shape in shapes]
    assert passes(library, lambda Q, K: found.append(require_batches_broadcast(2, Q=Q, K=K, V=None)), *arrays)
    assert found == [together]


def test_nothing_broadcasts_to_no_axes():
    assert require_batches_broadcast(2, Q=None) == ()


def test_leading_axes_that_do_not_broadcast_are_listed():
    message = "The leading axes of Q and K must be equal or broadcast; Q has (2,), K has (6, 3)."
    with pytest.raises(ValueError, match=exactly(message)):
        require_batches_broadcast(2, Q=zeros(2, 4, 4), K=zeros(6, 3, 4, 4))


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (2, 3, 4), (1, 1, 1)])
def test_a_mask_may_broadcast_to_the_scores(library, shape):
    assert passes(library, lambda mask: require_mask(mask, (2, 3, 4)), np.ones(shape, bool))
    require_mask(None, (2, 3, 4))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 3, 4), (1, 2, 3, 4), (2, 4)])
def test_a_mask_of_another_shape_is_refused(library, shape):
    message = f"mask must broadcast to the scores' shape (..., query, key) = (2, 3, 4); got {shape}."
    with pytest.raises(ValueError, match=exactly(message)):
        passes(library, lambda mask: require_mask(mask, (2, 3, 4)), np.ones(shape, bool))


def test_a_mask_of_numbers_is_refused_with_the_remedy(library):
    message = r"^seen must be bool, True where a query may attend; got (torch\.)?int64\. Compare it, as in seen != 0\."
    with pytest.raises(TypeError, match=message):
        passes(library, lambda mask: require_mask(mask, (3, 4), name="seen"), np.ones((3, 4), int))


def test_positive_values_pass_and_traced_ones_too(library):
    assert passes(library, lambda T: require_positive(temperature=T, other=0.5), np.array([1e-9, 2.0]))
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=exactly(f"temperature must be above 0; got {value!r}.")):
            require_positive(temperature=value)
    if library.jitted:
        assert passes(library, lambda T: require_positive(temperature=T), np.array([0.0]))
    else:
        with pytest.raises(ValueError, match="temperature must be above 0; got"):
            passes(library, lambda T: require_positive(temperature=T), np.array([1.0, 0.0]))


def test_counts_are_whole_numbers_that_are_large_enough():
    require_count(1, n=1, m=np.int64(3))
    require_count(0, n=0)
    with pytest.raises(ValueError, match=exactly("n must be at least 1; got 0.")):
        require_count(1, n=0)
    for value in (1.0, True, "3", None):
        with pytest.raises(TypeError, match=exactly(f"n must be a whole number; got {value!r}.")):
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
