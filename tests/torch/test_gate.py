from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from errors import rejects
from layers import CONTROLS, EXOTIC, GATES
from torch import nn
from torch_layers import every_dtype, make, sample, ungated

from tidegate import Gate, HeadShape
from tidegate.config import TransformerConfig
from tidegate.tensors import activations
from tidegate.torch import GatedAttention, KVCache, TransformerLM, gate_parameters
from tidegate.torch.gate import AttentionGate, GateReads, activate

ACTIVATIONS = ["sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh"]
SPELLED = [*map(str, GATES), *EXOTIC, *CONTROLS]
SHAPE = HeadShape(d_model=12, num_heads=4, num_kv_heads=2, head_dim=6)


def read(*, dtype=torch.float64, T=5):
    return GateReads(
        input=sample(2, T, 12, seed=1, dtype=dtype),
        context=sample(2, T, 12, seed=1, dtype=dtype),
        query=sample(2, T, 4, 6, seed=2, dtype=dtype),
        value=sample(2, T, 2, 6, seed=3, dtype=dtype),
        output=sample(2, T, 4, 6, seed=4, dtype=dtype),
        partition=sample(2, T, 4, seed=5, dtype=dtype),
    )


def module(gate, *, dtype=torch.float64):
    made = AttentionGate(Gate.parse(gate), SHAPE, dtype=dtype)
    for seed, parameter in enumerate(made.parameters()):
        parameter.data = sample(*parameter.shape, seed=10 + seed, dtype=dtype)
    return made


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_activation_is_that_of_the_tensors(activation, dtype):
    logits = torch.cat([torch.linspace(-60, 60, 241), torch.tensor([0.0, -1e4, 1e4])]).to(dtype).requires_grad_()
    fast, plain = activate(activation, logits), activations.activate(activation, logits)
    assert_close(fast, plain)
    found, expected = (torch.autograd.grad(values.sum(), logits)[0] for values in (fast, plain))
    assert_close(found, expected, what="gradient")


@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
@every_dtype
def test_some_activations_are_exactly_one_at_zero(activation, dtype):
    assert (activate(activation, torch.zeros(3, dtype=dtype)) == 1).all()


@pytest.mark.parametrize("gate", SPELLED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_computed_in_float32_whatever_the_dtype(gate, dtype):
    gating, reads = module(gate, dtype=dtype), read(dtype=dtype)
    wide = module(gate)
    wide.load_state_dict(gating.state_dict())
    exact = wide.logits(gating.source(reads).double())
    assert gating.logits(gating.source(reads)).dtype == gating(gating.source(reads)).dtype == torch.float32
    assert_close(gating.logits(gating.source(reads)), exact)


@pytest.mark.parametrize("gate", SPELLED)
def test_logits_are_computed_in_float32_under_autocast(gate):
    gating, reads = module(gate, dtype=torch.float32), read(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (reads.input @ reads.input.mT).dtype == torch.bfloat16
        logits = gating.logits(gating.source(reads))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, gating.logits(gating.source(reads)))


@pytest.mark.parametrize("gate", SPELLED)
def test_a_matrix_starts_with_its_deviation_and_a_bias_at_its_value(gate):
    torch.manual_seed(0)
    shape = HeadShape(d_model=256, num_heads=8, num_kv_heads=4, head_dim=64)
    gating = AttentionGate(Gate.parse(gate), shape)
    for name, parameter in gating.named_parameters():
        if name == "bias":
            assert (parameter == gating.gate.bias).all()
            continue
        deviation = gating.gate.rank**-0.5 if name == "weight_down" else 0.02
        # The standard error of a standard deviation is its value over sqrt(2n), and that of a mean over sqrt(n).
        n = parameter.numel()
        assert abs(parameter.std().item() / deviation - 1) < 6 / (2 * n) ** 0.5
        assert abs(parameter.mean().item() / deviation) < 6 / n**0.5


def test_a_layer_has_each_gate_under_the_name_of_its_site():
    layer = make("g1+g2+g3+g4+g5")
    assert list(dict(layer.attn_gate.named_children())) == ["query", "key", "value", "output", "dense"]
    assert str(layer.attn_gate.at("value").gate) == "g2"
    assert make("g1").attn_gate.at("value") is None
    assert len(list(make("none").attn_gate.parameters())) == 0


def test_gate_parameters_are_found_by_type_and_not_by_name():
    layer, bare = GatedAttention(24, 4, gate="g1+bma"), AttentionGate(Gate(bias=1.0), SHAPE)
    model = nn.ModuleDict({"attn_gate": nn.Linear(3, 3), "layer": layer, "deep": nn.ModuleList([bare, layer])})
    own = [*layer.attn_gate.parameters(), *bare.parameters()]
    found = list(gate_parameters(model))
    assert {id(parameter) for parameter in found} == {id(parameter) for parameter in own}
    assert len(found) == len(own) == 4
    assert list(gate_parameters(make("none"))) == []


class TestPlacebos:
    def test_no_gradient_reaches_what_a_shuffled_gate_reads(self):
        layer = make("output:input:shuffled")
        x = sample(2, 6, 24, requires_grad=True)
        layer.o_proj.weight.data.zero_()
        values = layer.trace(x)[1].gates["output"]
        values.sum().backward()
        assert x.grad is None
        assert layer.attn_gate.output.weight.grad.any()

    def test_a_shuffled_gate_refuses_one_sequence_and_a_cache(self):
        layer = make("value:query:shuffled")
        with rejects("x"):
            layer(sample(1, 6, 24))
        with rejects("cache"):
            layer(sample(2, 6, 24), cache=KVCache())

    @pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}], ids=str)
    def test_a_sinks_placebo_counts_the_keys_that_are_seen(self, options):
        layer, x = make("output:partition:head:b0.7:constant", **options), sample(2, 6, 24)
        visible = torch.arange(1, 7).clamp(max=options.get("window", 6)) if options.get("causal", True) else 6
        kept = (torch.log(torch.as_tensor(visible, dtype=torch.float64)) + 0.7).sigmoid().expand(6)
        y, trace = layer.trace(x)
        torch.testing.assert_close(y, ungated(layer)(x) * kept[:, None])
        torch.testing.assert_close(trace.gates["partition"], kept[:, None, None].expand(2, 6, 4, 1))
        torch.testing.assert_close(layer(x), y)

    def test_generation_goes_on_with_a_placebo_that_reads_no_other_sequence(self):
        config = TransformerConfig(vocab_size=31, d_model=24, num_layers=2, gate="off-by-one")
        constant = replace(config, gate="output:partition:head:constant")
        model = TransformerLM(constant)
        prompt = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(0))
        tokens = model.generate(prompt, max_new_tokens=6, temperature=0)
        assert torch.equal(model(tokens[:, :-1]).argmax(-1)[:, 4:], tokens[:, 5:])
        shuffled = TransformerLM(replace(config, gate="output:input:shuffled"))
        with rejects("cache"):
            shuffled.generate(prompt, max_new_tokens=6)
