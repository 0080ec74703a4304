import math

import pytest
import torch
from closeness import assert_close

from tidegate.torch.observing.observation import HISTOGRAM_EDGES
from tidegate.torch.observing.sums import RunningGate, RunningMoments, RunningRank, RunningSpread

rng = torch.Generator().manual_seed(0)
VALUES = torch.rand(6, 3, 5, generator=rng, dtype=torch.float64)
COUNTED = torch.rand(6, 3, 5, generator=rng) < 0.7
EDGES = HISTOGRAM_EDGES["mass"]


def chosen(head):
    return VALUES[:, head][COUNTED[:, head]]


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2], [1] * 6])
def test_parts_give_what_the_whole_gives(sizes):
    running = RunningMoments(EDGES, 3)
    for values, counted in zip(VALUES.split(sizes), COUNTED.split(sizes), strict=True):
        running.add(values, counted)
    for head, moments in enumerate(running.moments()):
        values = chosen(head)
        assert moments.count == len(values)
        found = torch.tensor([moments.mean, moments.std, moments.low, moments.high], dtype=torch.float64)
        expected = torch.stack([values.mean(), values.std(correction=0), values.min(), values.max()])
        assert_close(found, expected)
        histogram = torch.histogram(values, torch.tensor(EDGES, dtype=torch.float64)).hist
        assert moments.histogram == tuple(histogram.int().tolist())


def test_a_large_mean_costs_no_deviation():
    running = RunningSpread()
    for part in VALUES.split(1):
        running.add(part + 1e9, torch.ones((), dtype=torch.bool), (0, 2))
    assert_close(running.std, VALUES.std(dim=(0, 2), correction=0), what="finite difference")


def test_a_value_outside_the_edges_is_counted_at_the_nearest_end():
    running = RunningMoments((0.0, 1.0, 2.0, 3.0), 1)
    values = torch.tensor([[[-5.0, 0.0, 1.0, 3.0, 99.0, math.nan]]], dtype=torch.float64)
    running.add(values, torch.tensor([[[True] * 5 + [False]]]))
    assert running.moments()[0].histogram == (2, 1, 2)


def test_a_value_that_is_not_a_number_is_not_hidden():
    running = RunningMoments(EDGES, 1)
    running.add(torch.tensor([[[0.5, math.nan]]], dtype=torch.float64), torch.ones(1, 1, 2, dtype=torch.bool))
    (moments,) = running.moments()
    assert math.isnan(moments.mean)
    assert sum(moments.histogram) == 1


def test_effective_rank_is_that_of_all_rows_together():
    rows = torch.randn(40, 6, generator=rng, dtype=torch.float64) * torch.tensor([5, 3, 1, 0.5, 0.1, 0])
    running = RunningRank()
    for part in rows.split(7):
        running.add(part)
    shares = torch.linalg.svdvals(rows)
    shares = shares / shares.sum()
    assert running.largest == float(rows.abs().max())
    assert_close(running.effective_rank(), torch.special.entr(shares).sum().exp(), what="finite difference")


def test_a_stream_that_is_not_finite_has_no_rank():
    running = RunningRank()
    running.add(torch.tensor([[1.0, math.nan]]))
    running.add(torch.ones(2, 2))
    assert math.isnan(running.effective_rank())
    assert math.isnan(running.largest)


@pytest.mark.parametrize(
    ("activation", "top"), [("sigmoid", 1), ("twosigmoid", 2), ("tanh1", 2), ("silu", None), ("identity", None)]
)
def test_a_gate_is_summarized_by_head(activation, top):
    values = torch.rand(30, 4, 5, generator=rng, dtype=torch.float64) * (top or 3)
    running = RunningGate(activation)
    assert running.summary() is None
    for part in values.split(7):
        running.add(part)
    running.add(values[:0])
    summary = running.summary()
    by_head = values.transpose(0, 1).flatten(1)
    found = torch.tensor([summary.mean, summary.below, summary.token_spread], dtype=torch.float64)
    below = (by_head < 0.1).double().mean(1)
    assert_close(found, torch.stack([by_head.mean(1), below, values.std(0, correction=0).mean(1)]))
    assert_close(summary.head_spread, by_head.mean(1).std(correction=0))
    if top is None:
        assert summary.saturated is None
    else:
        at_an_end = (by_head <= 0.05) | (by_head >= top - 0.05)
        assert_close(torch.tensor(summary.saturated, dtype=torch.float64), at_an_end.double().mean(1))
