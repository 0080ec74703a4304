import numpy as np
import pytest
from closeness import assert_close, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tidegate.tensors.heads import merge_groups, repeat_heads, split_groups, sum_groups

BATCHES = [(), (2,), (2, 3)]


def heads(*shape, dtype=np.float64):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_group_serves_neighbouring_heads(library, dtype):
    given = [heads(*batch, 2, 3, 4, dtype=dtype) for batch in BATCHES]
    for x, repeated in zip(
        given, library.call(lambda *each: [repeat_heads(one, 6) for one in each], *given), strict=True
    ):
        assert isinstance(repeated, library.kind)
        assert to_numpy(repeated).dtype == dtype
        for n in range(6):
            assert (to_numpy(repeated)[..., n, :, :] == x[..., n // 3, :, :]).all()


def test_a_group_is_merged_side_by_side_in_order(library):
    given = [heads(*batch, 6, 3, 4) for batch in BATCHES]
    for x, merged in zip(
        given, library.call(lambda *each: [merge_groups(one, 2) for one in each], *given), strict=True
    ):
        assert isinstance(merged, library.kind)
        assert merged.shape == (*x.shape[:-3], 2, 3, 12)
        for n in range(6):
            part = to_numpy(merged)[..., n // 3, :, 4 * (n % 3) : 4 * (n % 3 + 1)]
            assert (part == x[..., n, :, :]).all()


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
    assert summed.shape == x.shape
    assert_close(np.sum(to_numpy(repeated) * y), np.sum(x * to_numpy(summed)))
    assert_close(summed, np.stack([y[..., :3, :, :].sum(-3), y[..., 3:, :, :].sum(-3)], axis=-3))


def test_one_head_each_changes_nothing():
    x = heads(4, 3, 2)
    for same in (repeat_heads(x, 4), merge_groups(x, 4), split_groups(x, 1), sum_groups(x, 4)):
        assert (same == x).all()
