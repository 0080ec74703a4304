import jax
import numpy as np
import pytest
import torch
from errors import rejects

from tidegate.tensors._checks import (
    is_false,
    require_count,
    require_head_mask,
    require_mask,
    require_positive,
)


def run(library, check, *arrays):
    """Call a check with arrays of this library."""
    library.call(lambda *own: check(*own) or own[0], *arrays)


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
