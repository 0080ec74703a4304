"""Laws of the blocks that attention is cut into: together they see what a mask allows, each pair once."""

import itertools

import numpy as np
import pytest

from tidegate.tensors.spans import Blocks, KeyRun, Segment, plan_blocks

LENGTHS = [(1, 1), (2, 2), (7, 7), (16, 16), (63, 63), (1, 9), (5, 9), (9, 40)]
"""Queries and keys of a segment."""


def allowed(segments, causal, window):
    """(queries, keys) how often each query may see each key: 0 or 1."""
    counts = np.zeros((sum(s.num_queries for s in segments), sum(s.num_keys for s in segments)), int)
    for query, num_queries, key, num_keys in segments:
        distance = np.arange(num_keys - num_queries, num_keys)[:, None] - np.arange(num_keys)
        seen = np.ones(distance.shape, bool) if window is None else abs(distance) < window
        counts[query : query + num_queries, key : key + num_keys] = seen & (distance >= 0) if causal else seen
    return counts


def visits(plan, shape):
    """How often the blocks of a plan let each query see each key, and how often they have each query."""
    pairs, queries = np.zeros(shape, int), np.zeros(shape[0], int)
    for num_queries, runs, firsts, origins in plan:
        for first, origin in zip(firsts, origins, strict=True):
            queries[first : first + num_queries] += 1
            for run in runs:
                ahead = np.arange(run.num_keys) - np.arange(num_queries)[:, None]
                seen = (ahead >= (-np.inf if run.low is None else run.low)) & (
                    ahead <= (np.inf if run.high is None else run.high)
                )
                assert seen.any(axis=1).all(), "a query sees no key of a run"
                start = origin + run.start
                assert start >= 0
                assert start + run.num_keys <= shape[1]
                pairs[first : first + num_queries, start : start + run.num_keys] += seen
    return pairs, queries


def lay_out(*shapes):
    """Segments of these numbers of queries and keys, end to end."""
    queries, keys = (np.cumsum([0, *numbers]).tolist() for numbers in zip(*shapes, strict=True))
    return [Segment(queries[i], t, keys[i], s) for i, (t, s) in enumerate(shapes)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 9, 30, 62, 63, 100])
def test_every_pair_that_may_meet_meets_once(causal, window):
    rows = [lay_out(shape) for shape in LENGTHS]
    packed = lay_out((3, 3), (1, 1), (16, 16), (3, 3), (1, 1), (40, 40), (3, 3))
    for segments, size, least in itertools.product([*rows, packed, lay_out((9, 12), (9, 12))], (1, 4, 16), (1, 12, 99)):
        expected = allowed(segments, causal, window)
        plan = plan_blocks(segments, causal=causal, window=window, size=size, least_keys=least)
        pairs, queries = visits(plan, expected.shape)
        np.testing.assert_array_equal(pairs, expected)
        assert (queries == 1).all()


def test_a_causal_row_is_one_causal_call():
    assert plan_blocks(lay_out((50, 50)), causal=True, window=None, size=8, least_keys=1) == (
        Blocks(50, (KeyRun(0, 50, high=0),), range(1), range(1)),
    )


def test_keys_scored_grow_with_the_length_and_not_with_its_square():
    def scored(length):
        plan = plan_blocks(lay_out((length, length)), causal=True, window=32, size=16, least_keys=64)
        return sum(blocks.num_queries * run.num_keys * len(blocks.queries) for blocks in plan for run in blocks.runs)

    assert scored(4096) < 2.1 * scored(2048)
    assert scored(4096) < 4096 * 50
