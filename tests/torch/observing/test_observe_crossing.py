"""Cross-attention: all queries count, and the source's padding applies to the keys only."""

import pytest
import torch
from closeness import assert_close
from torch import nn
from torch.nn import functional as F

from tidegate.torch import GatedAttention
from tidegate.torch.observing.watcher import observe

REAL = torch.arange(6) < torch.tensor([[4], [6]])
X, SOURCE = torch.randn(2, 2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def multihead(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options).eval()


class Unnamed(nn.Module):
    """Cross-attention that cannot be recognized by its arguments."""

    def forward(self, x, memory, mask):
        x, memory = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (x, memory))
        return F.scaled_dot_product_attention(x, memory, memory, attn_mask=mask)


def through_multihead(x, need_weights=False):
    layer = multihead()
    return layer, {}, lambda: layer(x, SOURCE, SOURCE, key_padding_mask=~REAL, need_weights=need_weights)


def through_ours(x):
    layer = GatedAttention(16, 4, gate="none", causal=False, dtype=torch.float64)
    return layer, {}, lambda: layer(x, context=SOURCE, mask=REAL[:, None, None])


def through_a_name(x):
    layer = nn.ModuleDict({"across": Unnamed()})
    return layer, {"crossing": ("across",)}, lambda: layer["across"](x, SOURCE, REAL[:, None, None])


WAYS = {
    "multihead": through_multihead,
    "multihead with weights": lambda x: through_multihead(x, need_weights=True),
    "ours": through_ours,
    "by name": through_a_name,
}


@pytest.mark.parametrize("num_queries", [6, 2, 9])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_query_counts_at_its_position(way, num_queries):
    x = torch.cat((X, X.flip(1)), dim=1)[:, :num_queries]
    layer, options, run = WAYS[way](x)
    with observe(layer, **options) as watcher:
        run()
    (found,) = watcher.observation().layers
    assert found.positions == tuple(range(num_queries))
    assert {moments.count for moments in found.heads["mass"]} == {2 * num_queries}


@torch.no_grad()
def test_given_padding_does_not_apply_to_the_source():
    layer, _, run = through_multihead(X[:, :3])
    with observe(layer, padding=torch.zeros(2, 3, dtype=torch.bool)) as watcher:
        run()
    assert watcher.observation().layers[0].heads["mass"][0].count == 6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("added", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=["bias", "zero"])
@torch.no_grad()
def test_keys_that_a_layer_appends_have_no_positions(added, need_weights, causal):
    layer = multihead(**added)
    mask = nn.Transformer.generate_square_subsequent_mask(6).isinf() if causal else None
    options = {"key_padding_mask": ~REAL, "attn_mask": mask}
    with observe(layer) as watcher:
        layer(X, X, X, need_weights=need_weights, **options)
    (found,) = watcher.observation().layers
    _, weights = layer(X, X, X, average_attn_weights=False, **options)
    assert found.positions == tuple(range(6))
    for head, moments in enumerate(found.heads["mass"]):
        assert moments.count == 10
        assert_close(moments.mean, float(weights[:, head, :, 0][REAL].mean()))


def test_a_source_of_a_single_key_has_curves_and_no_means():
    layer = multihead()
    with torch.no_grad(), observe(layer) as watcher:
        layer(X, SOURCE[:, :1], SOURCE[:, :1], need_weights=False)
    (found,) = watcher.observation().layers
    mass = found.heads["mass"][0]
    assert (mass.count, mass.mean, mass.std, mass.low, mass.high, sum(mass.histogram)) == (0, 0, 0, 0, 0, 0)
    assert found.by_position["mass"][0] == (1,) * 6
