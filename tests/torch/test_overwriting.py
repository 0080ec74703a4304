"""Where nothing is differentiated, large results are written over instead of anew: nobody may notice."""

import pytest
import torch
from closeness import assert_close
from covers import OPTION, SPELLING, axis, over
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layers import every_dtype, make, sample

from tidegate.torch import GatedAttention, gate
from tidegate.torch.kernel import is_untracked


@pytest.fixture
def all_large(monkeypatch):
    """Every tensor counts as large."""
    monkeypatch.setattr(gate, "_LARGE", 0)


class Operations(TorchDispatchMode):
    """The names of the operations that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


def operations(layer, x):
    with Operations() as operations:
        layer(x)
    return operations.names


@pytest.mark.usefixtures("all_large")
@over(gate=SPELLING, options=OPTION, batch=axis([1, 2]))
def test_without_gradients_the_values_are_those_with_gradients(gate, options, batch):
    layer = make(gate, **options)
    x = sample(batch, 5, 24)
    before = x.clone()
    y, trace = layer.trace(x)
    with torch.no_grad():
        assert_close(layer(x), y)
        again, fast = layer.trace(x)
    assert_close(again, y)
    for name in ("query", "key", "value", "output"):
        assert_close(getattr(fast, name), getattr(trace, name))
    for site, values in trace.gates.items():
        assert_close(fast.gates[site], values)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("all_large")
@every_dtype
@pytest.mark.parametrize("gate", ["bma", "bma-query", "g1", "g5"])
def test_the_dtype_is_that_of_the_layer(gate, dtype):
    layer, x = make(gate, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, layer(x).detach())


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("gate", ["bma", "bma-query", "g1", "g2", "g5"])
def test_a_gate_makes_one_large_tensor_if_nothing_is_differentiated(gate):
    layer, x = make(gate), sample(2, 5, 24)
    with torch.no_grad():
        names = operations(layer, x)
    assert {"sigmoid_", "mul_"} <= set(names)
    assert not {"sigmoid", "mul"} & set(names)
    assert not {"sigmoid_", "mul_"} & set(operations(layer, x))


def test_small_tensors_are_left_alone():
    layer = make("bma")
    with torch.no_grad():
        assert not {"sigmoid_", "mul_"} & set(operations(layer, sample(2, 5, 24)))
        large = GatedAttention(64, 4, gate="bma")
        assert {"sigmoid_", "mul_"} <= set(operations(large, torch.randn(1, 1024, 64)))


def by_module(gate, hook):
    return gate.register_forward_hook(hook)


def by_every_module(gate, hook):
    def of_the_gate(module, arguments, result):
        if module is gate:
            hook(module, arguments, result)

    return nn.modules.module.register_module_forward_hook(of_the_gate)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("register", [by_module, by_every_module])
@pytest.mark.parametrize(("gate", "site"), [("bma", "value"), ("bma-query", "output"), ("g5", "dense")])
def test_a_hook_may_keep_the_values_that_it_sees(gate, site, register):
    layer, x, kept = make(gate), sample(2, 5, 24), []
    handle = register(layer.attn_gate.at(site), lambda _module, _arguments, values: kept.append(values))
    try:
        with torch.no_grad():
            layer(x)
    finally:
        handle.remove()
    _, trace = layer.trace(x)
    assert_close(kept[0], trace.gates[site])


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(("gate", "site"), [("bma", "value"), ("bma-query", "output"), ("g5", "dense")])
def test_a_forward_put_in_the_place_of_the_gates_own_keeps_what_it_returns(gate, site):
    layer, x = make(gate), sample(2, 5, 24)
    constant = torch.full((2, 5, 24) if site == "dense" else (2, 5, 4, 6), 0.5, dtype=torch.float64)
    layer.attn_gate.at(site).forward = lambda _source: constant
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))
    assert (constant == 0.5).all()


@pytest.mark.usefixtures("all_large")
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


def test_what_is_followed_and_what_is_of_another_kind():
    plain, parameter = torch.zeros(3), nn.Parameter(torch.zeros(3))
    assert is_untracked(plain)
    assert not is_untracked(plain, parameter)
    with torch.no_grad():
        assert is_untracked(plain, parameter)

        class Kind(torch.Tensor):
            pass

        assert not is_untracked(plain.as_subclass(Kind))
        assert torch.func.vmap(lambda x: x + is_untracked(plain))(torch.zeros(2)).sum() == 0
        with torch.autograd.forward_ad.dual_level():
            assert not is_untracked(torch.autograd.forward_ad.make_dual(plain, torch.ones(3)))
