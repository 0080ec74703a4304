"""A query that may see only one key is left out of means, and included in curves by position."""

import pytest
import torch
from closeness import assert_close
from observed import Attention, qkv
from torch import nn

from tidegate.torch import observe

EQUAL = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
"""A row of four queries with equal weights on all keys that they may see."""


def observed(mask=None, **options):
    model = Attention()
    with observe(model, **options) as watcher:
        model(*EQUAL, attn_mask=mask, is_causal=mask is None)
    (layer,) = watcher.observation().layers
    return layer


def test_means_begin_at_the_second_query_of_a_causal_row():
    layer = observed()
    (mass,), (entropy,) = layer.heads["mass"], layer.heads["entropy"]
    assert mass.count == 3
    assert_close(mass.mean, (1 / 2 + 1 / 3 + 1 / 4) / 3, dtype="float32")
    assert_close(entropy.mean, float(torch.tensor([2.0, 3.0, 4.0]).log().mean()), dtype="float32")
    assert mass.high < 0.6
    assert sum(mass.histogram) == 3
    assert layer.positions == (0, 1, 2, 3)
    assert_close(layer.by_position["mass"][0], [1, 1 / 2, 1 / 3, 1 / 4], dtype="float32")
    assert layer.by_position["entropy"][0][0] == 0


DOCUMENTS = torch.tensor([0, 0, 1, 1])
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
MASKS = {
    "two documents": ((DOCUMENTS[:, None] == DOCUMENTS) & CAUSAL, 2, (0, 1, 2, 3)),
    "padding on the left": (CAUSAL & (torch.arange(4) >= 1), 2, (1, 2, 3)),
    "a window of one key": (torch.eye(4, dtype=torch.bool), 0, (0, 1, 2, 3)),
    "no causality": (torch.ones(4, 4, dtype=torch.bool), 4, (0, 1, 2, 3)),
}


@pytest.mark.parametrize(("mask", "count", "positions"), MASKS.values(), ids=MASKS)
def test_means_are_of_queries_that_see_several_keys_and_curves_of_all(mask, count, positions):
    layer = observed(mask[None, None])
    assert {moments.count for by_head in layer.heads.values() for moments in by_head} == {count}
    assert layer.positions == positions


def test_heads_may_differ_in_what_they_see():
    q, k, v = qkv(B=1, H=2, G=2, T=4, S=4)
    model = Attention()
    with observe(model) as watcher:
        model(q, k, v, attn_mask=torch.stack([CAUSAL, torch.ones_like(CAUSAL)])[None])
    assert [each.count for each in watcher.observation().layers[0].heads["mass"]] == [3, 4]


def test_a_source_of_a_single_key_has_no_means():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), observe(model) as watcher:
        model(torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8), need_weights=False)
    (mass, _) = watcher.observation().layers[0].heads["mass"]
    assert (mass.count, mass.mean, mass.std, mass.low, mass.high, sum(mass.histogram)) == (0, 0, 0, 0, 0, 0)
