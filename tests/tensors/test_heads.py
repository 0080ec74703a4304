import numpy as np
import pytest
from closeness import assert_close, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tidegate.tensors.heads import merge_groups, repeat_heads, split_groups, sum_groups

BATCHES = [(), (2,), (2, 3)]


def heads(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@given(batch=st.sampled_from(BATCHES), groups=st.integers(1, 3), size=st.integers(1, 3), T=st.integers(0, 4))
def test_splitting_undoes_merging(batch, groups, size, T):
    x = heads(*batch, groups * size, T, 2)
    assert (split_groups(merge_groups(x, groups), size) == x).all()
    y = heads(*batch, groups, T, size * 2)
    assert (merge_groups(split_groups(y, size), groups) == y).all()


@pytest.mark.parametrize("batch", BATCHES)
def test_summing_is_the_transpose_of_repeating(library, batch):
    x, y = heads(*batch, 2, 3, 4), heads(*batch, 6, 3, 4)
    repeated, summed = library.call(lambda x, y: (repeat_heads(x, 6), sum_groups(y, 2)), x, y)
    assert isinstance(summed, library.kind)
    assert_close(np.sum(to_numpy(repeated) * y), np.sum(x * to_numpy(summed)))
    assert_close(summed, np.stack([y[..., :3, :, :].sum(-3), y[..., 3:, :, :].sum(-3)], axis=-3))
