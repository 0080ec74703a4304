"""`recompute_gate`: the same numbers for less memory."""

from functools import cache

import pytest
import torch
from closeness import assert_close
from covers import every_layer
from torch_layers import gradients, make, sample

from tidegate.torch import KVCache, plain_kernel

T, WIDTH, HEADS = 512, 512, 8


def both(gate, **options):
    """Two layers with the same weights; the second recomputes its gates."""
    layer, recomputing = make(gate, **options), make(gate, recompute_gate=True, **options)
    recomputing.load_state_dict(layer.state_dict())
    return layer, recomputing


@cache
def bytes_for_backward(gate, *, recompute_gate=False):
    """Return the bytes that one forward pass saves for its backward pass, without parameters."""
    layer = make(gate, d_model=WIDTH, num_heads=HEADS, dtype=torch.float32, recompute_gate=recompute_gate)
    x = sample(1, T, WIDTH, dtype=torch.float32, requires_grad=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return sum(size for pointer, size in saved.items() if pointer not in parameters)


@every_layer
def test_recomputed_gates_give_the_same_values_and_gradients(gate, options):
    layer, recomputing = both(gate, **options)
    x = sample(2, 5, 24, requires_grad=True)
    y, z = layer(x), recomputing(x)
    assert torch.equal(y, z)
    expected = gradients(layer, y, x)
    for name, gradient in gradients(recomputing, z, x).items():
        assert_close(gradient, expected[name], what="gradient")


@pytest.mark.parametrize("gate", ["bma", "bma-query", "g1+g2+g3+g4+g5"])
def test_a_recomputed_gate_has_a_second_derivative(gate):
    _, recomputing = both(gate, d_model=4, num_heads=2)
    with plain_kernel():
        assert torch.autograd.gradgradcheck(recomputing, (sample(1, 3, 4, requires_grad=True),))


def test_recomputing_goes_with_a_cache_and_without_gradients():
    layer, recomputing = both("g1+bma")
    x = sample(2, 5, 24)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            cache = KVCache()
            y = torch.cat([recomputing(x[:, :3], cache=cache), recomputing(x[:, 3:], cache=cache)], dim=1)
            assert_close(y, layer(x))


def test_recomputing_goes_with_dropout():
    torch.manual_seed(0)
    layer, recomputing = both("g1+bma", dropout=0.5)
    x = sample(2, 5, 24, requires_grad=True)
    found = []
    for either in (layer, recomputing):
        torch.manual_seed(1)
        found.append(gradients(either, either(x), x))
    for name, gradient in found[1].items():
        assert_close(gradient, found[0][name], what="gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recomputing_goes_with_autocast(dtype):
    layer, recomputing = both("g1+bma", dtype=torch.float32)
    x = sample(2, 5, 24, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y, z = layer(x), recomputing(x)
    assert torch.equal(y, z)
    expected = gradients(layer, y.float(), x)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(recomputing, z.float(), x).items())


@pytest.mark.parametrize(("gate", "most"), [("bma-query", 1.05), ("g1", 1.05), ("bma", 1.20), ("g2", 1.20)])
def test_a_recomputed_gate_keeps_little_for_the_backward_pass(gate, most):
    plain = bytes_for_backward("none")
    assert bytes_for_backward(gate, recompute_gate=True) <= most * plain
    assert bytes_for_backward(gate) > most * plain
