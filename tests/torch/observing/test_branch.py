"""The contribution of a key set to a layer's output, compared with the attention matrix; and where it is unknown."""

import pytest
import torch
from closeness import assert_close
from observed import Attention, qkv, several_keys, weights_and_scores
from torch import nn
from torch.nn import functional as F

from tidegate.torch import GatedAttention, observe
from tidegate.torch.observing.call_statistics import key_set_output
from tidegate.torch.observing.statistics import AttentionCall, attention_statistics

GATES = ["none", "g1", "g1-head", "bma", "bma-query", "vga+g1", "output:input:add", "g1+g5", "output:output:silu"]
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": CAUSAL[None, None]},
    "one column": {"attn_mask": torch.tensor([True] * 6 + [False])[None, None, :, None]},
    "additive": {"attn_mask": torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)},
    "by row": {"attn_mask": torch.tensor([[True] * 7, [False] * 2 + [True] * 5])[:, None, None]},
}
KEYS = {
    "first": (0,),
    "several": (0, 3, 5),
    "none": (),
    "all": torch.ones(7, dtype=torch.bool),
    "by row": torch.arange(14).view(2, 7) % 3 == 0,
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_groups", [2, 4])
def test_the_output_of_a_key_set_is_that_of_the_attention_matrix(mask, keys, num_groups):
    options, chosen = MASKS[mask], KEYS[keys]
    q, k, v = qkv(G=num_groups)
    call = AttentionCall(q, k, v, options.get("attn_mask"), options.get("is_causal", False), None)
    statistics = attention_statistics(q, k, v, mask=call.mask, causal=call.causal)
    weights, _ = weights_and_scores(q, k, v, **options)
    in_set = torch.tensor([key in chosen for key in range(7)]) if isinstance(chosen, tuple) else chosen
    expected = (weights * in_set.double().view(-1, 1, 1, 7)) @ v.repeat_interleave(4 // num_groups, 1)
    assert_close(key_set_output(call, statistics.log_partition, chosen), expected)


def test_many_queries_are_computed_block_by_block():
    q, k, v = qkv(T=200, S=200)
    weights, _ = weights_and_scores(q, k, v, is_causal=True)
    statistics = attention_statistics(q, k, v, causal=True)
    call = AttentionCall(q, k, v, None, True, None)
    assert_close(key_set_output(call, statistics.log_partition, torch.ones(200, dtype=torch.bool)), weights @ v)


def contributions(trace, gate):
    """(B, H, T) by the definition, from a trace and the whole matrix of weights."""
    groups = trace.query.shape[1] // trace.key.shape[1]
    weights, _ = weights_and_scores(
        trace.query, trace.key, trace.value, is_causal=trace.causal, attn_mask=trace.mask, scale=trace.scale
    )
    from_first = weights[..., :1] * trace.value.repeat_interleave(groups, 1)[:, :, :1]
    output = trace.output.transpose(1, 2)
    if "output" in trace.gates:
        values = trace.gates["output"].transpose(1, 2)
        from_first, output = (from_first, output + values) if "add" in gate else (from_first * values, output * values)
    counted = several_keys(weights)
    squares = torch.where(counted, output.square().sum(-1), 0).sum(dim=(0, 2)) / counted.sum(dim=(0, 2))
    return from_first.norm(dim=-1) / squares.sum().sqrt(), counted


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "window": 3, "rope": True}, {"causal": False}])
@pytest.mark.parametrize("gate", GATES)
@torch.no_grad()
def test_contribution_is_the_norm_after_the_gate_over_that_of_the_whole_output(gate, options):
    torch.manual_seed(0)
    layer = GatedAttention(16, 4, gate=gate, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    _, trace = layer.trace(x)
    with observe(layer) as watcher:
        layer(x)
    (found,) = watcher.observation().layers
    expected, counted = contributions(trace, gate)
    for head, moments in enumerate(found.heads["contribution"]):
        chosen = expected[:, head][counted[:, head]]
        assert moments.count == len(chosen)
        assert_close([moments.mean, moments.std], [float(chosen.mean()), float(chosen.std(correction=0))])
        assert_close([moments.low, moments.high], [float(chosen.min()), float(chosen.max())])
        assert_close(found.by_position["contribution"][head], expected[:, head].mean(dim=0))


class Foreign(nn.Module):
    """Attention of another library, whose output may change before the projection."""

    def __init__(self, change, inner=False):
        super().__init__()
        self.change = change
        self.out = nn.Linear(16, 16, bias=False)
        self.gate = nn.Linear(16, 16)
        self.core = Attention() if inner else F.scaled_dot_product_attention

    def forward(self, x):
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        output = self.core(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.out(self.change(self, x, output))


CHANGES = {
    "none": (lambda _model, _x, output: output, True),
    "a gate from the input": (lambda model, x, output: output * model.gate(x).sigmoid(), False),
    "a gate from the output": (lambda model, _x, output: output * model.gate(output).sigmoid(), False),
    "heads in another order": (lambda _model, _x, output: output.roll(4, dims=-1), False),
    "a shift": (lambda _model, _x, output: output + 1e-3, False),
}


@pytest.mark.parametrize("inner", [False, True], ids=["in the layer", "in a module of its own"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_the_contribution_is_missing_if_anything_else_acts_on_the_output(change, inner):
    torch.manual_seed(0)
    function, known = CHANGES[change]
    model = Foreign(function, inner)
    with observe(model) as watcher:
        model(torch.randn(2, 5, 16))
    (layer,) = watcher.observation().layers
    assert ("contribution" in layer.heads) == ("contribution" in layer.by_position) == known
    assert ("-" in watcher.observation().table().splitlines()[2].split()) != known


@torch.no_grad()
def test_the_contribution_is_missing_after_one_batch_with_an_unknown_output():
    torch.manual_seed(0)
    model = Foreign(lambda model, _x, output: output * model.factor)
    model.factor = 1.0
    with observe(model) as watcher:
        model(torch.randn(2, 5, 16))
        assert "contribution" in watcher.observation().layers[0].heads
        model.factor = 0.5
        model(torch.randn(2, 5, 16))
        model.factor = 1.0
        model(torch.randn(2, 5, 16))
    assert "contribution" not in watcher.observation().layers[0].heads


@torch.no_grad()
def test_the_contribution_is_known_for_pytorchs_attention():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    with observe(model) as watcher:
        _, weights = model(x, x, x, average_attn_weights=False)
    value = F.linear(x, model.in_proj_weight[32:], model.in_proj_bias[32:]).unflatten(-1, (4, 4)).transpose(1, 2)
    output = weights @ value
    unit = output.square().sum(dim=(1, 3)).mean().sqrt()
    expected = (weights[..., :1] * value[:, :, :1]).norm(dim=-1) / unit
    found = [each.mean for each in watcher.observation().layers[0].heads["contribution"]]
    assert_close(torch.tensor(found, dtype=torch.float64), expected.mean(dim=(0, 2)))
