"""The PyTorch layer against `tidegate.tensors`, given the same weights."""

import pytest
import torch
from closeness import assert_close
from layers import CONTROLS, GATES
from torch_layers import ROTARY, every_option, every_spelling, gradients, make, sample

BOUNDARIES = (0, 2, 3, 6)
LEGAL_ACROSS = [str(gate) for gate in GATES if not gate.needs_self_attention]


def assert_same_layer(layer, x, *, context=None, **given):
    """Equal values, and equal gradients of everything, of the layer and its arrays."""
    inputs = (x,) if context is None else (x, context)
    across = {} if context is None else {"context": context}
    fast, plain = layer(x, **across, **given), layer.arrays()(x, **across, **given)
    assert_close(fast, plain)
    expected = gradients(layer, plain, *inputs)
    for name, gradient in gradients(layer, fast, *inputs).items():
        assert_close(gradient, expected[name], what="gradient")


@every_option
@every_spelling
def test_the_layer_is_its_reference(gate, options):
    assert_same_layer(make(gate, **options), sample(2, 5, 24, requires_grad=True))


@every_option
@pytest.mark.parametrize("gate", CONTROLS)
def test_placebos_are_their_references(gate, options):
    layer = make(gate, **options)
    assert_same_layer(layer, sample(3, 5, 24, requires_grad=True))
    mask = sample(3, 1, 5, 5, seed=3) > -0.3
    assert_same_layer(layer, sample(3, 5, 24, requires_grad=True), mask=mask)


@pytest.mark.parametrize("T", [1, 63, 100])
@pytest.mark.parametrize("gate", ["none", "bma", "bma-query", "g1+g2+g3+g4+g5"])
@every_option
def test_the_layer_is_its_reference_at_odd_lengths(gate, options, T):
    assert_same_layer(make(gate, **options), sample(1, T, 24, requires_grad=True))


@every_option
@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (2, 1, 6, 6), (2, 4, 1, 6), (2, 4, 6, 6), (1, 1, 1, 1)])
def test_a_mask_is_the_references_mask(options, shape):
    mask = sample(*shape, seed=3) > -0.3
    assert_same_layer(make("g1+bma", **options), sample(2, 6, 24, requires_grad=True), mask=mask)


@pytest.mark.parametrize("positions", [torch.tensor([4, 0, 7, 7, 1]), torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])])
@pytest.mark.parametrize("rope", [True, ROTARY])
def test_positions_are_the_references_positions(positions, rope):
    layer = make("g3+bma-query", rope=rope, num_kv_heads=2, head_dim=4)
    assert_same_layer(layer, sample(2, 5, 24, requires_grad=True), positions=positions)


@pytest.mark.parametrize(
    "options", [{}, {"rope": ROTARY, "num_kv_heads": 2, "head_dim": 4, "qk_norm": True, "bias": True}]
)
@pytest.mark.parametrize("gate", ["none", *LEGAL_ACROSS, "g1+g2+g3+g4+g5"])
def test_cross_attention_is_the_references(gate, options):
    layer = make(gate, causal=False, **options)
    x, context = sample(2, 3, 24, requires_grad=True), sample(2, 7, 24, seed=1, requires_grad=True)
    assert_same_layer(layer, x, context=context)
    assert_same_layer(layer, x, context=context, mask=sample(2, 1, 3, 7, seed=2) > 0)


def test_positions_in_cross_attention_are_the_queries():
    layer = make("bma-query", causal=False, rope=True)
    x, context = sample(2, 3, 24, requires_grad=True), sample(2, 7, 24, seed=1, requires_grad=True)
    assert_same_layer(layer, x, context=context, positions=torch.tensor([5, 2, 9]))


@every_option
def test_documents_are_a_block_mask(options):
    layer, x = make("g1+bma", **options), sample(1, 6, 24)
    boundaries = torch.tensor(BOUNDARIES)
    ids = torch.tensor([[0, 0, 1, 2, 2, 2]])
    expected = layer.arrays()(x, mask=(ids[:, :, None] == ids[:, None, :])[:, None])
    assert_close(layer(x, documents=ids), expected)
    assert_close(layer(x, documents=boundaries), expected)


@every_option
@pytest.mark.parametrize("gate", ["g1+g2+g3+g4+g5", "output:value+value:value:head+key:value+query:value:head"])
def test_the_trace_is_the_references_trace(gate, options):
    layer, x = make(gate, **options), sample(2, 5, 24)
    y, trace = layer.trace(x)
    plain = layer.arrays().trace(x)
    assert torch.equal(y, layer(x))
    assert_close(trace.query, plain.query)
    assert_close(trace.key, plain.key)
    assert_close(trace.value, plain.value)
    assert_close(trace.output.transpose(1, 2), plain.sources.output)
    assert list(trace.gates) == [g.path for g in layer.gates]
    for g in layer.gates:
        heads = (24,) if g.site == "dense" else (g.num_heads_at_site(layer.shape), g.gated_width(layer.shape))
        assert trace.gates[g.path].shape == (2, 5, *heads)


def test_the_traced_gates_are_what_multiplied():
    layer, x = make("g1+bma+g5"), sample(2, 5, 24)
    y, trace = layer.trace(x)
    raw = layer.v_proj(x).unflatten(-1, (4, 6))
    assert_close(trace.value.transpose(1, 2), raw * trace.gates["value"])
    assert_close(y, layer.o_proj((trace.output * trace.gates["output"]).flatten(-2)) * trace.gates["dense"])


def test_the_trace_says_what_the_kernel_was_given():
    layer, x = make("bma", temperature=0.5), sample(2, 5, 24)
    _, free = layer.trace(x)
    assert (free.mask, free.causal) == (None, True)
    assert free.scale == pytest.approx(2 / 6**0.5)
    _, masked = layer.trace(x, mask=torch.ones(5, 5, dtype=torch.bool))
    assert not masked.causal
    assert torch.equal(masked.mask, torch.ones(5, 5, dtype=torch.bool).tril())


def test_arrays_share_the_layers_memory():
    layer = make("g1+bma", bias=True, qk_norm=True, metric="learned")
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    arrays = layer.arrays().parameters()
    assert {array.untyped_storage().data_ptr() for array in arrays.values()} == own
    assert sum(array.numel() for array in arrays.values()) == layer.num_parameters()


def test_arrays_carry_the_options():
    layer = make("g1", head_dim=4, rope=ROTARY, window=3, temperature=0.7, metric="diagonal", causal=False)
    arrays = layer.arrays()
    assert (arrays.rotary, arrays.window, arrays.temperature, arrays.causal) == (ROTARY, 3, 0.7, False)
    assert arrays.shape == layer.shape
    assert arrays.metric_factor is None
