import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from covers import axis, over
from errors import rejects
from jax_layers import COMBINED
from layers import CONTROLS, EXOTIC, GATES, TOGETHER, gate_parameters, make_layer

from tidegate import Gate
from tidegate.tensors import layer_gradients
from tidegate.tensors.activations import activate
from tidegate.tensors.attention import attention_weights
from tidegate.tensors.gating import GateSources, apply_gate
from tidegate.tensors.gradients import grad_output_wrt_A, grad_softmax
from tidegate.tensors.layer_gradients import gate_backward, layer_backward, verify_layer_gradients
from tidegate.tensors.rotary import Rotary

B, H, G, T, S, h, d = 2, 4, 2, 5, 7, 4, 6


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


X, CONTEXT = sample(B, T, d), sample(B, S, d, seed=1)
MASK = sample(B, 1, T, S, seed=2) > 0
MASK[0, 0, 2] = False
CAUSAL_MASK = MASK[..., :T] | np.eye(T, dtype=bool)
CAUSAL_MASK[1, 0, 3] = False

LAYERS = {
    "plain": {},
    "everything": {"full": True},
    "diagonal metric": {"metric_diagonal": sample(H, h, seed=3), "temperature": 2.0},
    "rotary": {"rotary": Rotary(base=20.0)},
    "query norm": {"q_norm": sample(h, seed=4), "norm_epsilon": 0.3},
    "key norm": {"k_norm": sample(h, seed=5)},
    "window": {"full": True, "window": 2},
    "window to both sides": {"full": True, "window": 3, "causal": False},
    "ungrouped": {"full": True, "G": 4},
    "one key head": {"full": True, "G": 1},
}


def names_of(layer, *inputs):
    return [*(f"dL_d{name}" for name in (*inputs, *layer.parameters())), "all_correct"]


SEVERAL = "bma+dense:output+query:query+output:output"


@over(
    gates=axis([SEVERAL, *map(str, GATES), *EXOTIC, *CONTROLS]),
    full=axis({"plain": False, "everything": True}, "everything"),
)
def test_every_gate_has_pytorchs_gradients(gates, full):
    layer = make_layer(gates, full=full)
    found = verify_layer_gradients(layer, torch.from_numpy(X), 1e-9, 1e-9, mask=CAUSAL_MASK)
    assert found == dict.fromkeys(names_of(layer, "x"), True)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_every_option_has_pytorchs_gradients(options):
    layer = make_layer("bma+g1", **options)
    positions = np.arange(T) + 3
    found = verify_layer_gradients(layer, torch.from_numpy(X), 1e-9, 1e-9, mask=CAUSAL_MASK, positions=positions)
    assert found == dict.fromkeys(names_of(layer, "x"), True)


def jax_gradients(layer, x, **options):
    """By hand and by autodiff, in one compilation, for a gradient of the output that is not the output."""
    arrays = {"x": x} | layer.parameters()
    E = sample(*x.shape, seed=8)

    @jax.jit
    def both(arrays):
        def moved(named):
            return layer.with_parameters({name: array for name, array in named.items() if name != "x"})

        _, back = jax.vjp(lambda named: moved(named)(named["x"], **options), arrays)
        return layer_backward(moved(arrays), arrays["x"], E, **options), back(jnp.asarray(E))[0]

    return both(arrays)


# PyTorch judges every gate; these four have every site, every source and both grains between them.
@pytest.mark.parametrize(
    "gates",
    [
        pytest.param(gates, marks=() if place in (0, 3, 4, 7) else pytest.mark.full)
        for place, gates in enumerate(TOGETHER)
    ],
)
def test_every_gate_has_jaxs_gradients(gates):
    by_hand, judge = jax_gradients(make_layer(gates), X)
    assert set(by_hand) == set(judge)
    for name, gradient in judge.items():
        assert_close(by_hand[name], gradient, what="gradient")


@pytest.mark.parametrize(
    "gates", [f"{EXOTIC[0]}+{EXOTIC[4]}+{EXOTIC[7]}", f"{EXOTIC[2]}+{EXOTIC[5]}+{EXOTIC[9]}+{EXOTIC[11]}"]
)
def test_exotic_gates_and_every_option_have_jaxs_gradients(gates):
    by_hand, judge = jax_gradients(make_layer(gates, full=True), X, mask=CAUSAL_MASK)
    assert set(by_hand) == set(judge)
    for name, gradient in judge.items():
        assert_close(by_hand[name], gradient, what="gradient")


# PyTorch judges every gate; central differences cost a forward pass for each parameter.
@pytest.mark.parametrize(
    "gates",
    [COMBINED[1], *(pytest.param(gate, marks=pytest.mark.full) for gate in (COMBINED[0], *COMBINED[2:], *EXOTIC))],
)
def test_every_gate_has_the_gradients_of_central_differences(gates):
    layer = make_layer(gates, full=True, d=3, H=2, G=1, window=2)
    found = verify_layer_gradients(layer, sample(3, 3), 1e-6, 1e-6)
    assert found == dict.fromkeys(names_of(layer, "x"), True)


@pytest.mark.full
def test_a_jax_layer_is_verified_eagerly():
    layer = make_layer("bma", H=1, G=1, d=2, h=2)
    found = verify_layer_gradients(layer, jnp.asarray(sample(2, 2)), 1e-9, 1e-9)
    assert found == dict.fromkeys(names_of(layer, "x"), True)


@pytest.mark.parametrize("gates", ["none", "g1+g2", "g3+g4+g5", "bma-query+vga", "output:output+key:value+query:query"])
@pytest.mark.parametrize("batch", ["both", "x alone", "context alone"])
def test_cross_attention_has_pytorchs_gradients(gates, batch):
    layer = make_layer(gates, full=True, causal=False)
    x = torch.from_numpy(X[0] if batch == "context alone" else X)
    context = torch.from_numpy(CONTEXT[0] if batch == "x alone" else CONTEXT)
    found = verify_layer_gradients(layer, x, 1e-9, 1e-9, context=context, mask=MASK, positions=np.arange(T) * 2)
    assert found == dict.fromkeys(names_of(layer, "x", "context"), True)


def test_an_empty_row_passes_no_gradient():
    layer = make_layer("bma+g1+g5", full=True, b_O=None)
    mask = np.ones((T, T), bool)
    mask[1] = False
    E = np.zeros((B, T, d))
    E[:, 1] = sample(B, d)
    for gradient in layer_backward(layer, X, E, mask=mask).values():
        assert (gradient == 0).all()


def test_gradients_have_the_callers_kind_and_their_arrays_shape(library):
    layer = make_layer("g1")
    found = library.call(lambda x, E: layer_backward(layer, x, E), X, sample(B, T, d, seed=3))
    assert set(found) == {"x", *layer.parameters()}
    for name, gradient in found.items():
        assert isinstance(gradient, library.kind)
        assert gradient.shape == (X if name == "x" else layer.parameters()[name]).shape
    assert_close(found["x"], layer_backward(layer, X, sample(B, T, d, seed=3))["x"], what="gradient")


def test_a_backward_pass_is_linear_in_what_comes_back():
    layer = make_layer("bma+g1", full=True)
    E, F = sample(B, T, d, seed=3), sample(B, T, d, seed=4)
    first, second, both = (layer_backward(layer, X, e) for e in (E, F, 2 * E - F))
    for name, gradient in both.items():
        assert_close(gradient, 2 * first[name] - second[name], what="gradient")


def test_a_wrong_gradient_is_found_by_name(monkeypatch):
    right = layer_gradients.activation_slope
    monkeypatch.setattr(layer_gradients, "activation_slope", lambda activation, z: right(activation, z) * 1.001)
    found = verify_layer_gradients(make_layer("g1"), torch.from_numpy(X), 1e-9, 1e-9)
    assert not found["dL_dgate.output.weight"]
    assert not found["all_correct"]
    assert found["dL_dW_O"]


def test_a_gradient_that_does_not_fit_is_rejected():
    with rejects("dL_dy"):
        layer_backward(make_layer(), X, np.ones((T, d)))
    for E in (np.ones((B, T, d), int), [1.0]):
        with pytest.raises(TypeError, match="dL_dy must"):
            layer_backward(make_layer(), X, E)


@pytest.mark.parametrize("text", [*map(str, GATES), *EXOTIC, *CONTROLS])
def test_a_gate_alone_has_pytorchs_gradients(text):
    gate = Gate.parse(text)
    heads = G if gate.on_source else H
    target = sample(B, T, d, seed=5) if gate.site == "dense" else sample(B, heads, T, h, seed=5)
    raw = {"input": X, "query": sample(B, H, T, h), "value": sample(B, G, T, h), "output": sample(B, H, T, h, seed=1)}
    raw["partition"] = sample(B, H, T, seed=2)
    sources = {name: torch.from_numpy(array).requires_grad_() for name, array in raw.items()}
    own = gate_parameters([gate], np.random.default_rng(3))[gate.path]
    parameters = {name: torch.from_numpy(array).requires_grad_() for name, array in own.items()}
    leaf, E = torch.from_numpy(target).requires_grad_(), torch.from_numpy(sample(*target.shape, seed=6))
    apply_gate(gate, leaf, GateSources(**sources), parameters).backward(E)

    found = gate_backward(gate, to_numpy(E), target, GateSources(**raw), own)
    assert_close(found.target, torch.zeros_like(leaf) if gate.op == "replace" else leaf.grad, what="gradient")
    if found.source is None:
        assert all(source.grad is None for source in sources.values())
    else:
        assert_close(found.source, sources[gate.reads].grad, what="gradient")
    assert set(found.parameters) == set(own)
    for name, gradient in found.parameters.items():
        assert_close(gradient, parameters[name].grad, what="gradient")


def test_a_key_without_a_value_and_a_gate_of_a_head_have_the_slope_of_a_factor_of_the_output():
    gate = Gate.parse("output:input:head")
    value, weights = sample(1, S, h, seed=1), attention_weights(sample(1, T, S))
    value[:, 0] = 0
    # Token i reads its own row of the matrix, whose gradient is then that of token i's logit.
    tokens, matrix = np.eye(T)[None], sample(1, T, 1, seed=2)
    opening, E = activate("sigmoid", matrix), sample(1, T, h, seed=3)
    along = (E * opening * (weights @ value)).sum(-1)

    found = gate_backward(gate, E[None], (weights @ value)[None], GateSources(input=tokens), {"weight": matrix})
    assert_close(found.parameters["weight"][..., 0], (1 - opening[..., 0]) * along, what="gradient")
    dL_dS = grad_softmax(grad_output_wrt_A(E * opening, value), weights)
    assert_close(dL_dS[..., 0], -weights[..., 0] * along, what="gradient")
