from collections import Counter
from functools import partial

import pytest
import torch
from closeness import assert_close

from tidegate import Gates
from tidegate.config import Rotary, TransformerConfig
from tidegate.torch import AttentionTrace, TransformerLM, observe
from tidegate.torch.block import TransformerBlock, TransformerStack


def randomize(module, *, seed=0):
    """Move every parameter far from its initial value, so that all of them have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.3 * noise)
    return module


def make(kind=TransformerStack, config=TransformerConfig, **options):
    return randomize(kind(config(**{"d_model": 24, "num_layers": 2} | options), dtype=torch.float64))


def sample(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normed(x, norm, kind):
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    scaled = centred / (centred.square().mean(-1, keepdim=True) + (1e-5 if kind == "layer" else 1e-6)).sqrt()
    shift = getattr(norm, "bias", None)
    return scaled * norm.weight + (0 if shift is None else shift)


def fed_forward(x, layer, kind):
    def affine(projection, x):
        return x @ projection.weight.T + (0 if projection.bias is None else projection.bias)

    up = affine(layer.up_proj, x)
    if kind == "gelu":
        return affine(layer.down_proj, up * 0.5 * (1 + torch.erf(up / 2**0.5)))
    gate = affine(layer.gate_proj, x)
    return affine(layer.down_proj, gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("feedforward", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_block_is_its_formula(norm, feedforward, bias):
    block = make(TransformerBlock, norm=norm, feedforward=feedforward, bias=bias)
    x = sample(2, 7, 24)
    middle = x + block.attention.arrays()(normed(x, block.attention_norm, norm))
    expected = middle + fed_forward(normed(middle, block.feedforward_norm, norm), block.feedforward, feedforward)
    assert_close(block(x), expected)


def gradients(stack, x):
    return torch.autograd.grad(stack(x).square().sum(), [x, *stack.parameters()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_have_the_same_gradients(dropout):
    x = sample(2, 7, 24).requires_grad_()
    plain, sparing = make(dropout=dropout), make(dropout=dropout, checkpoint_blocks=True)
    torch.manual_seed(0)
    expected = gradients(plain, x)
    torch.manual_seed(0)
    for actual, wanted in zip(gradients(sparing, x), expected, strict=True):
        assert torch.equal(actual, wanted)


def kept_bytes(stack, x):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = stack(x)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stack.parameters()}
    assert held.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def test_a_checkpointed_block_keeps_its_input_alone():
    x = sample(2, 64, 24).requires_grad_()
    two, three = (kept_bytes(make(checkpoint_blocks=True, num_layers=layers), x) for layers in (2, 3))
    assert three - two == x.numel() * x.element_size()


def test_transforms_pass_through_checkpointed_blocks():
    x, direction = sample(1, 5, 24), sample(1, 5, 24, seed=2)

    def energy(stack, x):
        return stack(x).sin().sum()

    results = []
    for stack in (make(), make(checkpoint_blocks=True)):
        slope = torch.func.grad(partial(energy, stack))
        _, along = torch.func.jvp(slope, (x,), (direction,))
        results.append((slope(x), along))
    (slope, along), (other_slope, other_along) = results
    assert_close(other_slope, slope, what="gradient")
    assert_close(other_along, along, what="gradient")


def test_dropout_acts_in_training_only():
    x = sample(2, 7, 24)
    plain = make()(x)
    for options in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        stack = make(**options)
        torch.manual_seed(0)
        assert not torch.equal(stack(x), stack(x))
        assert torch.equal(stack.eval()(x), plain)


@pytest.mark.parametrize("feedforward", ["swiglu", "gelu"])
def test_a_block_has_second_derivatives_in_forward_mode(feedforward):
    block = make(TransformerBlock, gate="output:input:silu", feedforward=feedforward)
    x, u = sample(1, 5, 24), sample(1, 5, 24, seed=2)

    def slope(x):
        return torch.func.jvp(block, (x,), (u,))[1]

    step = 1e-5
    expected = (slope(x + step * u) - slope(x - step * u)) / (2 * step)
    assert torch.allclose(torch.func.jvp(slope, (x,), (u,))[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("base", [1e4, 50.0], ids=["shared", "of its own"])
def test_a_stack_rotates_as_its_layers_do(base):
    stack = make(gate="bma")
    stack.blocks[1].attention.rotary = Rotary(base=base)
    x, positions = sample(2, 5, 24), torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 0, 1]])
    expected = x
    for block in stack.blocks:
        expected = block(expected, positions=positions)
    assert torch.equal(stack(x, positions=positions), stack.norm(expected))


@pytest.mark.parametrize("gate", ["none", "bma+g1", "sink+g5"])
def test_a_trace_is_one_ordinary_call(gate):
    model = TransformerLM(TransformerConfig(d_model=24, num_layers=2, vocab_size=11, gate=gate))
    tokens = torch.arange(14).reshape(2, 7) % 11
    logits, traces = model.trace(tokens)
    assert torch.equal(logits, model(tokens))
    assert [set(trace.gates) for trace in traces] == [{each.path for each in Gates.parse(gate)}] * 2
    assert all(isinstance(trace, AttentionTrace) for trace in traces)
    calls = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(tokens)
    ordinary = Counter(calls)
    with observe(model) as observer:
        model.trace(tokens)
    assert calls == ordinary + ordinary
    with observe(model) as expected:
        model(tokens)
    assert observer.observation().to_json() == expected.observation().to_json()
