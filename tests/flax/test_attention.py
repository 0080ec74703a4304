from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects
from jax_layers import key, make, quick_jit, sample
from torch_layers import OPTIONS

from tidegate.flax import AttentionConfig, attention_arrays, gated_attention, init_attention, trace_gates

NOTHING = axis({"no rows": (0, 5, 24), "no positions": (2, 0, 24)})
PATH = axis({"fused": jnp.float32, "plain": jnp.float64})
EVERYTHING = {"bias": True, "qk_norm": True, "metric": "learned", "rope": True, "num_kv_heads": 2}


def config_of(**options):
    return AttentionConfig(**{"d_model": 24, "num_heads": 4, **options})


def shapes(function, *arguments):
    """What the function gives, in shapes alone; what it rejects, it rejects here as it would under `jit`."""
    return jax.eval_shape(function, *arguments)


def drawn(config, **options):
    return shapes(lambda key: init_attention(key, config, **options), jax.random.key(0))


def names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves}


def test_parameters_are_a_plain_tree_with_stable_names():
    projections = {f"{letter}_proj.{name}" for letter in "qkvo" for name in ("kernel", "bias")}
    gates = {"attn_gate.value.weight", "attn_gate.output.weight_down", "attn_gate.output.weight_up"}
    norms = {"q_norm.scale", "k_norm.scale", "metric.weight"}
    assert names(drawn(config_of(gate="output:input:r2+bma", **EVERYTHING))) == projections | gates | norms
    plain = drawn(config_of(gate="none"))
    assert names(plain) == {f"{letter}_proj.kernel" for letter in "qkvo"}
    assert plain["attn_gate"] == {}


def test_projections_start_with_the_deviation_that_keeps_the_variance():
    config = AttentionConfig(d_model=128, num_heads=4, num_kv_heads=2, head_dim=16, gate="none", bias=True)
    params = quick_jit(lambda key: init_attention(key, config))(key())
    for name, fan_in in (("q_proj", 128), ("k_proj", 128), ("v_proj", 128), ("o_proj", 64)):
        kernel = params[name]["kernel"]
        # The deviation of an estimate from n numbers is its value over sqrt(2n), and that of a mean over sqrt(n).
        assert abs(kernel.std() * fan_in**0.5 - 1) < 6 / (2 * kernel.size) ** 0.5
        assert abs(kernel.mean() * fan_in**0.5) < 6 / kernel.size**0.5
        assert (params[name]["bias"] == 0).all()
    kernels = [params[name]["kernel"].ravel()[:64] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert all((a != b).any() for i, a in enumerate(kernels) for b in kernels[:i])


@pytest.mark.parametrize("metric", ["diagonal", "learned"])
def test_norms_and_metrics_start_as_the_identity(metric):
    config = config_of(gate="none", qk_norm=True, metric=metric)
    params = quick_jit(lambda key: init_attention(key, config))(key())
    assert (params["q_norm"]["scale"] == 1).all()
    assert (params["k_norm"]["scale"] == 1).all()
    identity = np.ones(6) if metric == "diagonal" else np.eye(6)
    assert (params["metric"]["weight"] == np.broadcast_to(identity, (4, *identity.shape))).all()


def test_another_key_starts_elsewhere_and_each_gate_on_its_own():
    start = quick_jit(lambda key: init_attention(key, config_of(gate="output:query+query:query")))
    first, again, other = (start(key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), first, other)))
    assert (first["attn_gate"]["output"]["weight"] != first["attn_gate"]["query"]["weight"]).any()


X = sample(2, 5, 24)
REJECTED = [
    *[("bma", {}, {"x": sample(*shape)}, "x") for shape in ((5, 24), (2, 5, 23))],
    *[("g1", {"causal": False}, {"context": sample(*shape)}, "context") for shape in ((5, 24), (3, 7, 24))],
    *[("bma-query", options, {"context": X}, "context") for options in ({}, {"causal": False, "window": 2})],
    ("g1", {"causal": False}, {"context": X, "segment_ids": np.zeros((2, 5), int)}, "segment_ids"),
    *[("g1", {}, {"segment_ids": np.zeros(shape, int)}, "segment_ids") for shape in ((1, 5), (2, 4))],
    *[("bma", {"rope": True}, {"positions": np.zeros(shape, int)}, "positions") for shape in ((4,), (3, 5))],
    *[("g1", {}, {"mask": np.ones(shape, bool)}, "mask") for shape in ((2, 5), (4, 5, 5))],
    ("bma", {}, {"is_causal": "no"}, "is_causal"),
]


@pytest.mark.parametrize(("gate", "options", "given", "field"), REJECTED)
def test_an_input_that_does_not_fit_is_rejected_by_name(gate, options, given, field):
    layer = make(gate, **options)
    given = {"x": X, "config": layer.config, "is_causal": layer.is_causal} | given
    with rejects(field):
        shapes(lambda: gated_attention(layer.params, **given))


@pytest.mark.parametrize("gate", ["bma", "key:query", "output:value", "g1+bma"])
def test_a_gate_that_needs_self_attention_rejects_a_context_and_offers_another(gate):
    layer = make(gate, causal=False)
    with rejects("gate", hint="Use a gate such as 'bma-query' or 'g1'"):
        shapes(lambda x, context: layer(x, context=context), X, sample(2, 7, 24))


WRONG_TYPES = [
    ({"x": np.zeros((2, 5, 24), np.int32)}, "x"),
    ({"x": X, "context": np.zeros((2, 5, 24), bool)}, "context"),
    ({"x": X, "mask": [[True]]}, "mask"),
    *[({"x": X, "mask": np.ones((5, 5), dtype)}, "mask") for dtype in (np.int32, np.uint8, np.complex64)],
    *[({"x": X, "segment_ids": np.zeros((2, 5), dtype)}, "segment_ids") for dtype in (np.float32, np.bool_)],
    ({"x": X, "cache": []}, "cache"),
]


@pytest.mark.parametrize(("given", "name"), WRONG_TYPES)
def test_an_input_of_a_wrong_type_is_rejected_by_name(given, name):
    layer = make("g1", causal=False)
    with pytest.raises(TypeError, match=f"^{name} must be"):
        layer(**given)


def reach(layer, x):
    """(T, T) bool: which inputs move which outputs, by the derivative of the first row's."""
    slopes = quick_jit(jax.jacrev(lambda x: layer(x).sum(axis=-1)))(x)
    return abs(slopes[0, :, 0]).max(axis=-1) > 0


@over(causal=axis([True, False]), window=axis([3, 1, None]), dtype=PATH)
def test_a_window_reaches_back_and_without_causality_ahead_too(causal, window, dtype):
    layer = make("g1+bma", causal=causal, window=window, dtype=dtype)
    distance = np.arange(6)[:, None] - np.arange(6)
    expected = (abs(distance) < (window or 6)) & ((distance >= 0) | (not causal))
    assert (reach(layer, sample(1, 6, 24, dtype=dtype)) == expected).all()


def test_causality_is_the_default():
    layer, x = make("bma"), sample(2, 5, 24)
    y = quick_jit(lambda x: gated_attention(layer.params, x, layer.config))(x)
    assert_close(y, layer.by_torch(x))
    assert abs(y - make("bma", causal=False).by_torch(x)).max() > 1e-2


def test_dropout_takes_a_key_and_is_off_without_one():
    layer = make("g1+bma", dropout=0.5)
    x, plain = sample(2, 5, 24), replace(layer, config=replace(layer.config, dropout=0.0))
    noisy = quick_jit(lambda key: layer(x, dropout_key=key))
    first, again, other = (noisy(key(seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    silent = quick_jit(lambda key: (layer(x), plain(x, dropout_key=key)))(key())
    for y in silent:
        assert_close(y, make("g1+bma").by_torch(x))


@over(shape=NOTHING, dtype=PATH)
def test_nothing_in_gives_gradients_of_zero(shape, dtype):
    layer, x = make("g1+bma", **OPTIONS["everything"], dtype=dtype), sample(*shape, dtype=dtype)
    differentiated = quick_jit(jax.value_and_grad(lambda params, x: layer.under(params)(x).sum()))
    total, gradients = differentiated(layer.params, x)
    assert total == 0
    assert all((gradient == 0).all() for gradient in jax.tree.leaves(gradients))


def test_an_additive_mask_keeps_the_precision_of_the_scores():
    layer, x = make("bma", dtype=jnp.float32), sample(2, 5, 24, dtype=jnp.bfloat16)
    mask = sample(5, 5, seed=1, dtype=jnp.float32)
    narrow, wide = quick_jit(lambda *inputs: [layer(x, mask=mask) for x in inputs])(x, x.astype(jnp.float32))
    assert_close(narrow, wide)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gate": "bma+g1"}, "attn_gate.output.weight is missing"),
        ({"num_heads": 8}, r"q_proj.kernel has shape \(24, 4, 6\), expected \(24, 8, 3\)"),
    ],
    ids=str,
)
def test_parameters_of_another_configuration_are_rejected(change, complaint):
    layer = make("bma")
    config = replace(layer.config, **{"head_dim": None, **change})
    with pytest.raises(ValueError, match=f"^params do not fit the configuration: .*{complaint}"):
        shapes(lambda x: gated_attention(layer.params, x, config), X)


def test_a_switch_is_a_boolean():
    layer = make()
    with rejects("is_causal"):
        trace_gates(layer.params, X, layer.config, is_causal="no")
    with rejects("causal"):
        attention_arrays(layer.params, layer.config, causal=1)
