import numpy as np
import pytest
import torch
from covers import SPELLING, axis, over
from errors import rejects
from layers import Rotary, make_layer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tidegate.experts.canonical import canonicalize, match_heads
from tidegate.experts.torch_adapter import attention_layers
from tidegate.experts.transform import change_basis, random_gauge
from tidegate.torch import TransformerConfig, TransformerLM

OPTIONS = {
    "plain": {},
    "rotary": {"rotary": Rotary(base=50.0)},
    "partly rotary": {"rotary": Rotary(base=50.0, fraction=0.5)},
    "norms and biases": {"full": True, "metric_factor": None, "rotary": None},
    "everything": {"full": True},
}
X = np.random.default_rng(0).standard_normal((2, 5, 6))


def farthest(a, b):
    return max(np.abs(array - b.parameters()[name]).max() for name, array in a.parameters().items())


@over(gate=SPELLING, options=axis(OPTIONS, "everything"))
def test_a_random_gauge_changes_no_output_and_the_canonical_layer_undoes_it(gate, options):
    layer = make_layer(gate, **options)
    moved = random_gauge(layer, np.random.default_rng(3))
    scale = 1 + np.abs(layer(X)).max()
    canonical = canonicalize(layer)
    assert np.abs(moved(X) - layer(X)).max() < 1e-12 * scale
    assert np.abs(canonical(X) - layer(X)).max() < 1e-12 * scale
    assert farthest(canonicalize(moved), canonical) < 1e-8


def test_a_random_gauge_moves_every_free_side():
    layer = make_layer("none")
    moved = random_gauge(layer, np.random.default_rng(3))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert np.abs(moved.parameters()[name] - layer.parameters()[name]).max() > 0.1


def test_ungated_channels_become_orthonormal_and_ordered():
    canonical = canonicalize(make_layer("none"))
    for group in range(2):
        np.testing.assert_allclose(canonical.W_V[group].T @ canonical.W_V[group], np.eye(4), atol=1e-12)
        out = canonical.W_O[2 * group : 2 * group + 2].transpose(1, 0, 2).reshape(4, -1)
        products = out @ out.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-10)
        assert np.all(np.diff(np.diag(products)) <= 0)


def test_gated_channels_get_norm_one():
    canonical = canonicalize(make_layer("g1"))
    np.testing.assert_allclose(np.linalg.norm(canonical.W_V, axis=1), 1, atol=1e-12)


def test_a_change_of_basis_that_a_gate_forbids_is_rejected():
    mixing = np.broadcast_to(np.eye(4) + 0.1, (2, 4, 4))
    change_basis(make_layer("none"), value=mixing)
    with rejects("value"):
        change_basis(make_layer("g1"), value=mixing)
    with rejects("query"):
        change_basis(make_layer("none", rotary=Rotary()), query=mixing)
    with rejects("query"):
        change_basis(make_layer("none", q_norm=np.ones(4), k_norm=np.ones(4)), query=mixing)
    with rejects("value"):
        change_basis(make_layer("output:input:add"), value=mixing)


def test_dependent_channels_are_left_as_they_are():
    layer = make_layer("none")
    layer.W_V[0, :, 0] = layer.W_V[0, :, 1]
    with pytest.warns(UserWarning, match="linearly dependent"):
        canonical = canonicalize(layer)
    np.testing.assert_allclose(canonical(X), layer(X), atol=1e-10)


def language_model(gate="none", **options):
    config = TransformerConfig(vocab_size=40, d_model=24, num_heads=6, num_layers=2, gate=gate, **options)
    model = TransformerLM(config, dtype=torch.float64)
    model.reset_parameters(seed=0)
    return enlarged(model)


def llama(num_kv_heads=3):
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return enlarged(LlamaForCausalLM(config).double().eval())


@torch.no_grad()
def enlarged(model):
    """The model with attention that matters to its output."""
    for name, parameter in model.named_parameters():
        if "_proj" in name or "attn_gate" in name:
            parameter.mul_(10)
    return model


@torch.no_grad()
def transformed(model, *, value_side_only=False):
    """The model at a random point of its gauge orbit, its heads in another order."""
    rng = np.random.default_rng(5)
    moved = canonicalize(model)
    orders = []
    for found in attention_layers(moved):
        order = rng.permutation(found.arrays.shape.num_kv_heads)
        gauged = random_gauge(found.arrays, rng)
        source = dict(gauged.parameters())
        if value_side_only:
            source |= {name: found.arrays.parameters()[name].detach().numpy().copy() for name in ("W_Q", "W_K")}
        repeats = found.arrays.shape.num_heads // len(order)
        heads = (order[:, None] * repeats + np.arange(repeats)).ravel()
        for name, view in found.arrays.parameters().items():
            by = heads if name in ("W_Q", "W_O", "b_Q") else order
            whole = name in ("b_O", "q_norm", "k_norm")
            view.copy_(torch.from_numpy(source[name] if whole else source[name][by].copy()))
        orders.append(heads)
    return moved, orders


def logits(model):
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result = model(tokens)
    return result if isinstance(result, torch.Tensor) else result.logits


def found_orders(a, b):
    return [match.assignment for match in match_heads(a, b)]


MODELS = {
    "ours": (lambda: language_model(), False),
    "ours, grouped": (lambda: language_model(num_kv_heads=3, bias=True), False),
    "Llama": (lambda: llama(6), True),
    "Llama, grouped": (lambda: llama(3), True),
}


@pytest.mark.parametrize(("build", "value_side_only"), MODELS.values(), ids=MODELS)
def test_matching_heads_of_two_checkpoints_becomes_exact(build, value_side_only):
    model = build()
    moved, orders = transformed(model, value_side_only=value_side_only)
    # Llama's norms work in float32 whatever the model's dtype.
    tolerance = 1e-5 if value_side_only else 1e-11
    assert (logits(moved) - logits(model)).abs().max() < tolerance * (1 + logits(model).abs().max())
    wanted = [np.argsort(order) for order in orders]
    raw = np.mean([found == order for found, order in zip(found_orders(model, moved), wanted, strict=True)])
    exact = found_orders(canonicalize(model), canonicalize(moved))
    # A random change of basis keeps the sign of half the heads, which the raw parameters still show.
    assert raw < 0.8
    assert [list(found) for found in exact] == [list(order) for order in wanted]


@pytest.mark.parametrize("gate", ["none", "bma", "g1", "g1-head", "g1+g2+g3+g4+g5"])
def test_a_canonical_model_has_the_same_logits(gate):
    model = language_model(gate, num_kv_heads=3, qk_norm=True, bias=True)
    canonical = canonicalize(model)
    assert (logits(canonical) - logits(model)).abs().max() < 1e-11 * (1 + logits(model).abs().max())
    before, after = (found.stack.blocks[0].attention.v_proj.weight for found in (model, canonical))
    assert (before - after).abs().max() > 1e-3


def test_single_precision_stays_within_its_rounding():
    model = language_model("bma").float()
    canonical = canonicalize(model)
    assert canonical.stack.blocks[0].attention.v_proj.weight.dtype == torch.float32
    assert (logits(canonical) - logits(model)).abs().max() < 1e-4 * (1 + logits(model).abs().max())


def test_modules_that_are_not_understood_are_rejected():
    with rejects("model"):
        canonicalize(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="PyTorch module"):
        canonicalize(3)
    strange = llama().model.layers[0].self_attn
    strange.gate = nn.Linear(2, 2)
    with rejects("model") as rejected:
        canonicalize(strange)
    assert rejected.value.got == "gate.weight, gate.bias"
    with rejects("b"):
        match_heads(make_layer("none"), make_layer("none", H=2, G=1))
