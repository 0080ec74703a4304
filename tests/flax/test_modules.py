import copy
import inspect
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import jax_layers
import numpy as np
import pytest
import torch_layers
from closeness import assert_close
from errors import rejects
from flax import nnx
from jax_layers import key
from jax_models import gradients_of_torch, jit_quickly, logits_of_torch, make, mean_loss, sample
from ray import cloudpickle

from tidegate.flax import (
    AttentionConfig,
    GatedAttention,
    Rotary,
    TransformerLM,
    attention,
    generate,
    init_attention,
    plain_params,
    trace_gates,
)


def layer_twin(layer, **options):
    """A `GatedAttention` with the options and weights of a layer of functions."""
    return GatedAttention.from_config(layer.config, params=layer.params, rngs=nnx.Rngs(0), **options)


def language_model(config, params, **options):
    return TransformerLM(config, params=params, rngs=nnx.Rngs(0), **options)


CONFIG = AttentionConfig(d_model=24, num_heads=4, bias=True)
OTHERS = {
    "num_kv_heads": 2,
    "rope": Rotary(base=50.0),
    "window": 3,
    "metric": "diagonal",
    "temperature": 0.5,
    "recompute_gate": True,
}
"""The options that NNX has no names of its own for."""


@pytest.fixture(scope="module")
def params():
    return jit_quickly(lambda: init_attention(key(), CONFIG))()


def run(module, *inputs, **options):
    """Call a module that changes nothing in itself."""
    return jit_quickly(lambda module, *inputs: module(*inputs, **options))(module, *inputs)


def normal(*shape, seed=0):
    return jax_layers.sample(*shape, seed=seed)


def test_every_option_reaches_the_configuration_and_comes_back():
    layer = nnx.eval_shape(
        lambda: GatedAttention(
            4, 24, 32, gate="g1", dropout_rate=0.5, use_bias=False, normalize_qk=True, **OTHERS, rngs=nnx.Rngs(0)
        )
    )
    named = {"d_model": 24, "num_heads": 4, "head_dim": 8, "gate": "g1", "dropout": 0.5, "bias": False, "qk_norm": True}
    # Whether it is causal is said at each call.
    assert layer.config == AttentionConfig(**named, **OTHERS, causal=False)
    again = nnx.eval_shape(lambda: GatedAttention.from_config(layer.config, rngs=nnx.Rngs(0)))
    assert again.config == layer.config
    assert {option.name for option in fields(AttentionConfig)} == {*named, *OTHERS, "causal"}


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_the_conventions_are_those_of_nnx(method):
    own, theirs = (
        inspect.signature(getattr(kind, method)).parameters for kind in (GatedAttention, nnx.MultiHeadAttention)
    )
    common = [name for name in own if name in theirs]
    assert len(common) > 7
    for name in common:
        assert own[name].default == theirs[name].default
    by_position = [name for name, option in own.items() if option.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(theirs)[: len(by_position)] == by_position


def nnx_twin(**options):
    """An ungated layer of ours, and nnx's with the same weights."""
    rngs, zeros = nnx.Rngs(0), nnx.initializers.zeros
    theirs = nnx.MultiHeadAttention(4, 24, 32, param_dtype=jnp.float64, kernel_init=zeros, rngs=rngs, **options)
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    params = {"attn_gate": {}}
    for seed, (name, other) in enumerate(names.items()):
        part = getattr(theirs, other)
        kernel, bias = (normal(*array.shape, seed=seed) for array in (part.kernel, part.bias))
        part.kernel, part.bias = nnx.Param(kernel / 5), nnx.Param(bias)
        params[name] = {"kernel": kernel / 5, "bias": bias}
    return GatedAttention(4, 24, 32, gate="none", params=params, rngs=rngs, **options), theirs


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_without_a_gate_it_is_nnxs_layer(num_kv_heads):
    ours, theirs = nnx_twin(num_kv_heads=num_kv_heads, decode=False)
    x, context, mask = normal(2, 5, 24), normal(2, 7, 24, seed=1), normal(2, 1, 5, 7, seed=2) > -0.5

    def calls(layer, x, context):
        return layer(x), layer(x, x, x, is_causal=True), layer(x, context, mask=mask), layer(x, context, context)

    # The kernel that nnx calls works in single precision.
    for own, other in zip(*(jit_quickly(calls)(layer, x, context) for layer in (ours, theirs)), strict=True):
        assert_close(own, other, dtype="float32")


def test_it_decodes_as_nnxs_layer_does():
    ours, theirs = nnx_twin(decode=True)
    x = normal(2, 3, 24)
    for layer in (ours, theirs):
        layer.init_cache((2, 4, 24), jnp.float64)
    step = nnx.jit(lambda layer, x: layer(x))
    for position in range(3):
        token = x[:, position : position + 1]
        assert_close(step(ours, token), step(theirs, token), dtype="float32")
    assert ours.cache_index[...] == theirs.cache_index[...] == 3
    assert ours.cached_key.shape == theirs.cached_key.shape
    assert_close(ours.cached_key[...], theirs.cached_key[...])


@pytest.mark.parametrize("gate", ["bma", "g1+g2+g3+g4+g5"])
def test_the_module_is_the_function(gate):
    options = {"num_kv_heads": 2, "head_dim": 4, "bias": True, "rope": True, "qk_norm": True, "metric": "learned"}
    layer, across = jax_layers.make(gate, **options), jax_layers.make(gate, **options, causal=False)
    module, x = layer_twin(layer), normal(2, 5, 24)
    assert jax.tree.structure(plain_params(module)) == jax.tree.structure(layer.params)
    assert module.config == layer.config
    positions = np.array([4, 0, 7, 7, 1])

    def calls(module, x):
        return module(x, is_causal=True), module(x, is_causal=False, positions=positions)

    causal, free = jit_quickly(calls)(module, x)
    assert_close(causal, layer.by_torch(x))
    assert_close(jit_quickly(lambda module, x: module.arrays()(x))(module, x), causal)
    assert_close(free, across.by_torch(x, positions=positions))


def test_decoding_in_chunks_is_causal_attention():
    layer = jax_layers.make("bma+g1", num_kv_heads=2, rope=True, window=4)
    module, x = layer_twin(layer, decode=True), normal(2, 6, 24)
    module.init_cache((2, 8, 24))
    assert module.cached_key.dtype == jnp.float64
    step = nnx.jit(lambda module, x: module(x))
    chunks = [step(module, x[:, start : start + 2]) for start in (0, 2, 4)]
    expected = layer.by_torch(x)
    assert_close(np.concatenate(chunks, axis=1), expected)
    assert_close(run(module, x, decode=False, is_causal=True), expected)
    assert module.cache_index[...] == 6


def test_parameters_are_drawn_from_the_rngs():
    def drawn(seed, **options):
        return plain_params(GatedAttention(4, 24, rngs=nnx.Rngs(key(seed)), **options))

    first, other = jit_quickly(lambda: (drawn(0), drawn(1)))()
    expected = jit_quickly(lambda: init_attention(nnx.Rngs(key(0)).params(), CONFIG))()
    assert jax.tree.all(jax.tree.map(np.array_equal, first, expected))
    assert not np.array_equal(first["q_proj"]["kernel"], other["q_proj"]["kernel"])
    half = jax.eval_shape(lambda: drawn(0, param_dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


def test_the_dtype_is_that_of_the_computation():
    layer = jax_layers.make("g1", dtype=jnp.float32)
    x = normal(2, 5, 24).astype(jnp.float32)
    half = layer_twin(layer, dtype=jnp.bfloat16)
    rounded, exact = np.asarray(run(half, x, is_causal=True)), layer.by_torch(x)
    assert rounded.dtype == jnp.bfloat16
    assert np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)
    half.init_cache((2, 5, 24))
    assert half.cached_key.dtype == jnp.bfloat16
    _, sown = jax.eval_shape(lambda half: nnx.capture(half, nnx.Intermediate)(x, sow_gates=True), half)
    assert [leaf.dtype for leaf in jax.tree.leaves(sown)] == [jnp.float32]


def test_dropout_is_asked_for_and_has_a_key(params):
    layer = GatedAttention(4, 24, dropout_rate=0.5, params=params, rngs=nnx.Rngs(0))
    x = normal(1, 3, 24)
    with rejects("deterministic"):
        layer(x)
    plain = layer(x, deterministic=True)
    assert not np.array_equal(layer(x, deterministic=False), layer(x, deterministic=False))
    first, again = (layer(x, deterministic=False, rngs=nnx.Rngs(3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.array_equal(nnx.view(layer, deterministic=True)(x), plain)
    layer.eval()
    assert np.array_equal(layer(x), plain)
    layer.train()
    assert not np.array_equal(layer(x), plain)


def test_a_layer_may_keep_no_keys(params):
    layer = GatedAttention(
        4, 24, dropout_rate=0.5, deterministic=False, keep_rngs=False, params=params, rngs=nnx.Rngs(0)
    )
    assert not jax.tree.leaves(nnx.state(layer, nnx.RngState))
    with rejects("rngs"):
        layer(normal(1, 3, 24))
    assert layer(normal(1, 3, 24), rngs=nnx.Rngs(0)).shape == (1, 3, 24)


GATES = ["g1+g2+g3+g4+g5", "output:output+value:value:head+key:query+query:value", "dense:output+output:query:head"]


@pytest.mark.parametrize("gate", GATES)
def test_traced_gates_are_pytorchs(gate):
    options = {"num_kv_heads": 2, "bias": True, "rope": True, "qk_norm": True, "window": 3, "metric": "diagonal"}
    twin, layer = torch_layers.make(gate, **options), jax_layers.make(gate, **options)
    _, trace = twin.trace(torch_layers.sample(2, 5, 24))
    gates = jit_quickly(lambda x: trace_gates(layer.params, x, layer.config))(normal(2, 5, 24))
    assert set(gates) == set(trace.gates)
    for site, values in gates.items():
        assert_close(values, trace.gates[site])


def test_gates_are_sown_where_asked_for():
    config, params = make(gate="bma+g1", num_kv_heads=2)
    model, tokens = language_model(config, params), sample(2, 5)
    _, sown = jax.eval_shape(lambda model: nnx.capture(model, nnx.Intermediate)(tokens, sow_gates=True), model)
    for layer in range(2):
        gates = sown["stack"]["blocks"][layer]["attention"]
        shapes = {name: [leaf.shape for leaf in jax.tree.leaves(gate)] for name, gate in gates.items()}
        assert shapes == {"value_gate": [(2, 5, 2, 6)], "output_gate": [(2, 5, 4, 6)]}
    _, unsown = jax.eval_shape(lambda model: nnx.capture(model, nnx.Intermediate)(tokens), model)
    assert not jax.tree.leaves(unsown)


def test_gates_are_sown_in_decoding_too():
    layer = jax_layers.make("output:output+bma")
    module, x = layer_twin(layer, decode=True), normal(2, 4, 24)
    expected = jit_quickly(lambda x: trace_gates(layer.params, x, layer.config))(x)
    module.init_cache((2, 4, 24))
    step = nnx.jit(lambda module, x: nnx.capture(module, nnx.Intermediate)(x, sow_gates=True))
    for start in (0, 2):
        _, sown = step(module, x[:, start : start + 2])
        for site, values in expected.items():
            (own,) = jax.tree.leaves(sown[f"{site}_gate"])
            assert_close(own, values[:, start : start + 2])


OPTIONS = {
    "rotary": {"gate": "bma", "num_kv_heads": 2, "qk_norm": True},
    "learned": {
        "gate": "g1+g5",
        "positions": "learned",
        "norm": "layer",
        "bias": True,
        "tie_embeddings": False,
        "num_layers": 1,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_model_is_its_function_and_so_are_its_gradients(options):
    config, params = make(**options)
    model, tokens = language_model(config, params), sample(2, 6)
    assert jax.tree.structure(plain_params(model)) == jax.tree.structure(params)
    ids = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2]])

    def module_loss(model):
        logits = model(tokens, segment_ids=ids)
        return mean_loss(logits, tokens), logits

    _, gradients, logits = gradients_of_torch(tokens, documents=ids, **options)
    (_, own_logits), state = jit_quickly(nnx.value_and_grad(module_loss, has_aux=True))(model)
    assert_close(own_logits, logits)
    own = nnx.to_pure_dict(state)
    own["stack"]["blocks"] = list(own["stack"]["blocks"].values())
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradients), strict=True):
        assert_close(one, other, what="gradient")


COPIES = {
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda module: cloudpickle.loads(cloudpickle.dumps(module)),
    "split and merge": lambda module: nnx.merge(*nnx.split(module)),
    "clone": nnx.clone,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_model_applies_each_gate_once(monkeypatch, copied):
    applied = []

    def counting(gate, *arguments):
        applied.append(str(gate))
        return apply_gate(gate, *arguments)

    apply_gate = attention.apply_gate
    monkeypatch.setattr(attention, "apply_gate", counting)
    config, params = make(gate="bma+g1+g5", num_layers=1)
    tokens = sample(2, 5)
    logits = run(copied(copied(language_model(config, params))), tokens)
    assert sorted(applied) == ["bma", "g1", "g5"]
    assert_close(logits, logits_of_torch(tokens, gate="bma+g1+g5", num_layers=1))


def test_a_model_decodes_what_it_says_at_once():
    config, params = make(positions="learned", gate="bma+g1", num_layers=1)
    model, tokens = language_model(config, params), sample(2, 6)
    expected = logits_of_torch(tokens, positions="learned", gate="bma+g1", num_layers=1)
    model.init_cache((2, 9))
    decoding = nnx.view(model, decode=True)
    step = nnx.jit(lambda model, tokens: model(tokens, num_logits=1))
    logits = [step(decoding, tokens[:, start : start + 2]) for start in (0, 2, 4)]
    assert_close(np.concatenate(logits, axis=1), expected[:, 1::2])
    assert_close(run(model, tokens), expected)


def test_a_model_generates_what_the_function_does():
    config, params = make(tie_embeddings=False, num_layers=1)
    prompt = sample(2, 5)
    expected = generate(params, prompt, config, max_new_tokens=4, temperature=0)
    assert np.array_equal(language_model(config, params).generate(prompt, max_new_tokens=4, temperature=0), expected)


X = jnp.zeros((2, 3, 24))
REJECTED = [
    ({"inputs_q": jnp.zeros((2, 3, 8))}, "x", ""),
    ({"inputs_k": X + 1}, "gate", ""),
    ({"inputs_v": X}, "inputs_v", ""),
    ({"inputs_k": X, "inputs_v": X + 1}, "inputs_v", ""),
    ({"decode": True}, "decode", "Call init_cache first"),
    *[({name: "no"}, name, "") for name in ("is_causal", "sow_gates", "deterministic", "decode")],
]


@pytest.mark.parametrize(("arguments", "field", "hint"), REJECTED)
def test_what_makes_no_sense_is_rejected_by_name(params, arguments, field, hint):
    layer = GatedAttention(4, 24, params=params, rngs=nnx.Rngs(0))
    with rejects(field, hint=hint):
        layer(**{"inputs_q": X} | arguments)


def test_a_floating_mask_is_rejected_with_the_remedy(params):
    layer = GatedAttention(4, 24, params=params, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^mask must be .* got float32\. Make it with dtype=bool"):
        layer(X, mask=nnx.make_causal_mask(X[..., 0]))


BAD_OPTIONS = [
    ((4, 10), {}, "in_features"),
    ((4, 24, 9), {}, "qkv_features"),
    ((0, 24), {}, "num_heads"),
    *[((4, 24), {name: "no"}, name) for name in ("use_bias", "normalize_qk", "keep_rngs", "deterministic")],
]


@pytest.mark.parametrize(("sizes", "options", "field"), BAD_OPTIONS)
def test_an_option_of_a_module_is_rejected_by_its_own_name(sizes, options, field):
    with rejects(field):
        GatedAttention(*sizes, **options, rngs=nnx.Rngs(0))


def test_parameters_that_do_not_fit_are_rejected():
    config, params = make(gate="bma")
    with pytest.raises(ValueError, match=r"params do not fit .*blocks.0.attention.attn_gate.output.weight is missing"):
        language_model(replace(config, gate="bma+g1"), params)
    with pytest.raises(ValueError, match=r"params do not fit .*q_proj.kernel has shape \(24, 4, 6\), expected"):
        GatedAttention(2, 24, params=params["stack"]["blocks"][0]["attention"], use_bias=False, rngs=nnx.Rngs(0))


def test_an_axis_needs_its_mesh(params):
    with rejects("mesh_axis", hint="jax.set_mesh"):
        GatedAttention(4, 24, mesh_axis="model", params=params, rngs=nnx.Rngs(0))


def test_an_axis_is_one_whose_shardings_jax_finds_out(params):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), rejects("mesh_axis", hint="jax.make_mesh"):
        GatedAttention(4, 24, mesh_axis="model", params=params, rngs=nnx.Rngs(0))


def test_a_model_has_blocks_of_different_widths():
    config, params = make(gate="bma", d_ff=(20, 28))
    tokens = sample(2, 5)
    assert_close(run(language_model(config, params), tokens), logits_of_torch(tokens, gate="bma", d_ff=(20, 28)))
