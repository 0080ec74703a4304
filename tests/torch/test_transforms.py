"""What PyTorch does to a layer: compile, export, move, transform, checkpoint, copy, quantize."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from closeness import assert_close
from covers import axis, every_layer, every_layer_with_one_gate, over
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch_layers import every_option, gradients, make, sample

from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention, TransformerConfig, TransformerLM, gate_parameters
from tidegate.torch.gate import AttentionGate

ROTATED = {"num_kv_heads": 2, "rope": Rotary(fraction=2 / 3), "qk_norm": True, "metric": "learned", "temperature": 0.7}
ALL_SITES = "g1+g2+g3+g4+g5"
READ_QUERIES = "output:query+value:query:head+key:query+query:query"
RECOMPUTED = {"window": 3, "recompute_gate": True}


compiles = pytest.mark.usefixtures("fresh_compiler")


def assert_same_when_compiled(layer, compiled, x):
    expected, y = layer(x), compiled(x)
    assert_close(y, expected)
    plain = gradients(layer, expected, x)
    for name, gradient in gradients(layer, y, x).items():
        assert_close(gradient, plain[name], what="gradient")


@compiles
@pytest.mark.parametrize(
    ("gate", "options"),
    [("bma", {}), pytest.param("g1+bma", ROTATED, marks=pytest.mark.full)],
    ids=["plain", "rotated"],
)
def test_a_compiled_layer_is_the_layer(gate, options, request):
    # Compiling a kernel takes a second, less without vector instructions; --full compiles as users do.
    compiler = None if request.config.getoption("--full") else {"cpp.vec_isa_ok": False}
    layer = make(gate, dtype=torch.float32, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=compiler)
    assert_same_when_compiled(layer, compiled, sample(2, 5, 24, dtype=torch.float32, requires_grad=True))


@compiles
def test_a_layer_is_the_same_in_the_operators_that_code_is_generated_from():
    layer = make("g1+bma", dtype=torch.float32, **ROTATED)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    assert_same_when_compiled(layer, compiled, sample(2, 5, 24, dtype=torch.float32, requires_grad=True))


@compiles
@pytest.mark.parametrize(
    ("gate", "options"),
    [
        (ALL_SITES, {**ROTATED, **RECOMPUTED}),
        (READ_QUERIES, {**ROTATED, "bias": True}),
        ("dense:output:r2:b1+output:value+key:value:head", {"num_kv_heads": 1, "causal": False}),
        pytest.param(ALL_SITES, ROTATED, marks=pytest.mark.full),
        pytest.param(ALL_SITES, RECOMPUTED, marks=pytest.mark.full),
        pytest.param(READ_QUERIES, {"bias": True}, marks=pytest.mark.full),
        pytest.param(READ_QUERIES, {**ROTATED, "recompute_gate": True}, marks=pytest.mark.full),
    ],
)
def test_a_layer_is_one_graph(gate, options):
    layer = make(gate, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same_when_compiled(layer, compiled, sample(2, 5, 24, requires_grad=True))


def assert_one_graph_serves_every_length(layer, *, dynamic, backend="aot_eager"):
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (5, 9, 63):
            x = sample(2, T, 24, requires_grad=True)
            if dynamic is None:
                torch._dynamo.mark_dynamic(x, 1)
            assert_same_when_compiled(layer, compiled, x)


@compiles
@pytest.mark.parametrize(
    "options",
    [
        {**ROTATED, **RECOMPUTED},
        pytest.param(ROTATED, marks=pytest.mark.full),
        pytest.param(RECOMPUTED, marks=pytest.mark.full),
    ],
    ids=["both", "rotated", "window"],
)
def test_one_graph_serves_every_length_that_is_marked_dynamic(options):
    assert_one_graph_serves_every_length(make("g1+bma", **options), dynamic=None)


# If all sizes are dynamic, an option could fix a length during capture, which the backend "eager" detects. The test
# above covers the graph of the backward pass, whose symbols take most of the time.
@compiles
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "metric": "learned", "qk_norm": True}, {"rope": True}], ids=str
)
def test_one_graph_serves_every_length_when_all_is_dynamic(options, backend):
    assert_one_graph_serves_every_length(make("g1+bma", **options), dynamic=True, backend=backend)


@compiles
@over(
    gate=axis(["none", "bma", "bma-query", ALL_SITES], ALL_SITES),
    options=axis({"plain": {}, "rotated": ROTATED}, "plain"),
)
def test_an_exported_layer_comes_back_from_disk(gate, options, tmp_path):
    layer = make(gate, dtype=torch.float32, **options).eval()
    T = torch.export.Dim("T", min=2, max=256)
    program = torch.export.export(layer, (sample(2, 5, 24, dtype=torch.float32),), dynamic_shapes={"x": {1: T}})
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for length in (5, 63):
        x = sample(2, length, 24, dtype=torch.float32)
        assert_close(loaded(x), layer(x))


@every_layer
def test_a_layer_is_built_without_memory_and_filled_later(gate, options):
    layer = GatedAttention(24, 4, gate=gate, device="meta", **options)
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.empty(2, 5, 24, device="meta")).shape == (2, 5, 24)
    layer = layer.to_empty(device="cpu")
    direct = GatedAttention(24, 4, gate=gate, **options)
    for either in (layer, direct):
        torch.manual_seed(0)
        either.reset_parameters()
    x = sample(2, 5, 24, dtype=torch.float32)
    assert torch.equal(layer(x), direct(x))


def second_difference(function, x, u, step=1e-3):
    """Second derivative along u to fourth order in the step."""
    near = function(x + step * u) + function(x - step * u)
    far = function(x + 2 * step * u) + function(x - 2 * step * u)
    return (16 * near - far - 30 * function(x)) / (12 * step**2)


@every_layer_with_one_gate
def test_forward_mode_of_both_orders_is_that_of_finite_differences(gate, options):
    layer, x, u = make(gate, **options), sample(1, 4, 24), sample(1, 4, 24, seed=1)
    layer.requires_grad_(requires_grad=False)

    def slope(x):
        return jvp(layer, (x,), (u,))[1]

    first, second = jvp(slope, (x,), (u,))
    step = 1e-5
    assert_close(first, (layer(x + step * u) - layer(x - step * u)) / (2 * step), what="finite difference")
    assert_close(second, second_difference(layer, x, u), what="finite difference")


@every_layer
def test_parameters_may_come_from_outside(gate, options):
    layer, other, x = make(gate, **options), make(gate, seed=1, **options), sample(2, 5, 24)
    given = dict(other.named_parameters())
    assert torch.equal(functional_call(layer, given, (x,)), other(x))
    weights = sample(2, 5, 24, seed=99)
    found = grad(lambda given: (functional_call(layer, given, (x,)) * weights).sum())(given)
    for name, gradient in gradients(other, other(x)).items():
        assert_close(found[name], gradient, what="gradient")


@every_option
@pytest.mark.parametrize("gate", ["none", "bma", "bma-query", ALL_SITES])
def test_mapping_over_inputs_and_parameters_is_a_loop(gate, options):
    layers = [make(gate, seed=seed, **options) for seed in range(3)]
    names = list(dict(layers[0].named_parameters()))
    stacked = {name: torch.stack([layer.get_parameter(name).detach() for layer in layers]) for name in names}
    xs = sample(3, 2, 5, 24)
    assert_close(vmap(layers[0])(xs), torch.stack([layers[0](x) for x in xs]))
    by_layer = vmap(lambda given, x: functional_call(layers[0], given, (x,)))(stacked, xs)
    assert_close(by_layer, torch.stack([layer(x) for layer, x in zip(layers, xs, strict=True)]))


@every_layer
def test_gradient_checkpointing_gives_the_same_gradients(gate, options):
    layer, x = make(gate, **options), sample(2, 5, 24, requires_grad=True)
    expected = gradients(layer, layer(x), x)
    found = gradients(layer, checkpoint(layer, x, use_reentrant=False), x)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.parametrize("gate", ["bma", "bma-query"])
def test_a_transform_may_batch_the_target_alone(gate):
    layer = make(gate)
    weights = sample(3, 24, 24, seed=1)
    x = sample(2, 5, 24)

    def with_values(weight):
        return torch.func.functional_call(layer, {"v_proj.weight": weight}, (x,))

    with torch.no_grad():
        together = torch.func.vmap(with_values)(weights)
        for weight, output in zip(weights, together, strict=True):
            assert_close(output, with_values(weight))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrize_a_projection(model):
    projection = model.stack.blocks[0].attention.v_proj
    with torch.no_grad():
        projection.weight.div_(2)
    torch.nn.utils.parametrize.register_parametrization(projection, "weight", Doubled())
    return model


def norm_the_projections(model):
    for name in ("q_proj", "v_proj", "o_proj"):
        weight_norm(model.stack.blocks[1].attention.get_submodule(name))
    return model


CHANGES = {
    "copied": copy.deepcopy,
    "parametrized": parametrize_a_projection,
    "weight norm": norm_the_projections,
    "quantized": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8),
    "compiled": partial(torch.compile, backend="eager", fullgraph=True),
}


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_gate_acts_once_whatever_copies_or_replaces_its_module(change):
    model = TransformerLM(TransformerConfig(d_model=24, num_layers=2, vocab_size=11, gate="g1+g2+g3+g4+g5"))
    with torch.no_grad():
        for gate in gate_parameters(model):
            gate.mul_(30)
    tokens, calls = torch.arange(10).reshape(2, 5), Counter()
    for name, module in model.named_modules():
        if isinstance(module, AttentionGate):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    expected = model(tokens)
    assert len(calls) == 10
    calls.clear()
    changed = change(model)
    logits = changed(tokens)
    assert set(calls.values()) == {1}
    assert len(calls) == 10
    if change is CHANGES["quantized"]:
        # A gate that acted twice would change the logits by more than their own size.
        assert (logits - expected).norm() < 0.1 * expected.norm()
    else:
        assert_close(logits, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_layer_leaves_the_error_of_its_projection_as_it_is():
    layer = torch.ao.quantization.quantize_dynamic(make("bma", dtype=torch.float32), {nn.Linear})
    with pytest.raises(RuntimeError, match=r"(?i)float"):
        layer(sample(2, 5, 24))
