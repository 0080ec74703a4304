from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects
from jax_layers import key
from jax_models import (
    SIZES,
    gradients_of_torch,
    jit_quickly,
    logits_of_torch,
    make,
    mean_loss,
    sample,
    with_stacked_blocks,
)

from tidegate.config import TransformerConfig
from tidegate.flax import (
    apply_model,
    apply_model_cached,
    cast_params,
    init_caches,
    init_model,
    stack_layers,
    unstack_layers,
)
from tidegate.flax.block import drop

apply, apply_cached = (
    jit_quickly(function, static_argnames=("config", "num_logits")) for function in (apply_model, apply_model_cached)
)


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


compiled_init = jit_quickly(init_model, static_argnums=1)


def drawn(config, *, seed=0):
    # NumPy arrays, whose statistics need no compilation.
    return jax.tree.map(np.asarray, compiled_init(key(seed), config))


def same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def assert_trees_close(actual, expected, **options):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, **options)


def test_matrices_start_small_and_those_that_write_to_the_stream_smaller():
    config = TransformerConfig(
        d_model=64, num_layers=2, vocab_size=512, norm="layer", bias=True, positions="learned", tie_embeddings=False
    )
    params = named(drawn(config))
    for name, array in params.items():
        *_, owner, leaf = name.split(".")
        if leaf in ("kernel", "embedding"):
            expected = 0.02 / 2 if owner in ("o_proj", "down_proj") else 0.02
            assert abs(array.std() / expected - 1) < 0.05, name
            assert abs(array.mean()) < 4 * expected / array.size**0.5, name
        elif leaf in ("scale", "bias"):
            assert (array == (leaf == "scale")).all(), name
        else:
            assert abs(array.std() / 0.02 - 1) < 0.1, name


@pytest.mark.parametrize("init", ["fan-in", "torch"])
def test_matrices_start_by_their_inputs(init):
    config = TransformerConfig(d_model=64, d_ff=256, num_layers=2, vocab_size=512, bias=True, init=init, gate="none")
    params = named(drawn(config))
    for name, array in params.items():
        *_, owner, leaf = name.split(".")
        fan_in = 256 if owner == "down_proj" else 64
        share = 3**-0.5 if init == "torch" else 0.5 if owner in ("o_proj", "down_proj") else 1.0
        expected = 0.02 if leaf == "embedding" else share * fan_in**-0.5
        if leaf in ("kernel", "embedding"):
            assert abs(array.std() / expected - 1) < 0.05, name
            assert (abs(array).max() < 2 * expected) == (init == "torch" and leaf == "kernel"), name
        elif leaf == "bias" and "norm" not in owner:
            assert array.any() == (init == "torch"), name
            assert abs(array).max() < fan_in**-0.5, name


def test_variants_share_what_they_have_in_common_and_no_two_matrices_are_alike():
    sizes = SIZES | {"vocab_size": 5}
    plain = named(drawn(TransformerConfig(**sizes, gate="none")))
    variant = named(drawn(TransformerConfig(**sizes, gate="g1+g5", qk_norm=True, tie_embeddings=False)))
    assert set(plain) < set(variant)
    for name, array in plain.items():
        assert np.array_equal(array, variant[name]), name
    firsts = [array.flat[0] for array in variant.values() if array.ndim > 1]
    assert len(set(firsts)) == len(firsts)
    assert not same(plain, named(drawn(TransformerConfig(**sizes, gate="none"), seed=1)))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_parameters_have_the_dtype_that_was_asked_for(dtype):
    options = {"bias": True, "qk_norm": True, "metric": "learned", "positions": "learned", "tie_embeddings": False}
    config = TransformerConfig(gate="output:query:r2:b1+bma", **options)
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), config, dtype=dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(dtype)}


def loss_and_gradients(config, params, tokens, **options):
    """By the loop over blocks, or by the scan over stacked ones."""

    def loss(params):
        return mean_loss(apply_model(params, tokens, config, **options), tokens)

    value, gradients = jit_quickly(jax.value_and_grad(loss))(params)
    gradients = jax.tree.map(np.asarray, gradients)
    blocks = gradients["stack"]["blocks"]
    gradients["stack"]["blocks"] = unstack_layers(blocks) if isinstance(blocks, dict) else blocks
    return value, gradients


def test_a_scan_over_stacked_blocks_is_the_loop_over_blocks():
    options, tokens = {"gate": "bma+g5", "num_kv_heads": 2}, sample(2, 6)
    config, params = make(**options)
    *expected, _ = gradients_of_torch(tokens, **options)
    assert_trees_close([*loss_and_gradients(config, with_stacked_blocks(params), tokens)], expected, what="gradient")


both_ways = pytest.mark.parametrize("arrange", [lambda params: params, with_stacked_blocks], ids=["loop", "scan"])


@pytest.fixture(scope="module")
def dropping():
    """A model with all its dropout, and its loss and gradients by the loop over blocks, nothing computed again."""
    config, params = make(gate="bma+g5", num_kv_heads=2, dropout=0.3, attention_dropout=0.2)
    return config, params, loss_and_gradients(config, params, sample(2, 6), dropout_key=key())


@both_ways
def test_blocks_that_are_computed_again_drop_the_same_and_have_the_same_gradients(dropping, arrange):
    config, params, expected = dropping
    again = replace(config, checkpoint_blocks=True)
    found = loss_and_gradients(again, arrange(params), sample(2, 6), dropout_key=key())
    assert_trees_close(found, expected, what="gradient")


def residual_bytes(config, params, tokens):
    backward = jax.eval_shape(lambda params: jax.vjp(lambda p: apply_model(p, tokens, config), params)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@both_ways
def test_checkpointed_blocks_keep_their_input_alone(arrange):
    tokens = sample(2, 16)
    kept = {}
    for checkpoint in (False, True):
        for layers in (1, 2):
            config, params = make(num_layers=layers, checkpoint_blocks=checkpoint)
            kept[checkpoint, layers] = residual_bytes(config, arrange(params), tokens)
    stream = 2 * 16 * 24 * 8
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(params["stack"]["blocks"][0]))
    assert kept[True, 2] - kept[True, 1] <= stream + parameters
    assert kept[False, 2] - kept[False, 1] > 5 * stream + parameters


def test_recomputed_gates_keep_nothing_that_they_made():
    tokens = sample(2, 16)
    plain, spared = (
        residual_bytes(*make(gate="bma+g1+g5", recompute_gate=recompute), tokens) for recompute in (False, True)
    )
    # In each of two layers at least the values of the gates at the output and the dense site, and what they gated.
    assert plain - spared > 2 * 3 * 2 * 16 * 24 * 8


def test_recomputed_gates_have_the_same_gradients():
    options, tokens = {"gate": "bma+g1+g5", "num_layers": 1}, sample(2, 6)
    config, params = make(recompute_gate=True, **options)
    *expected, _ = gradients_of_torch(tokens, **options)
    assert_trees_close([*loss_and_gradients(config, params, tokens)], expected, what="gradient")


@over(
    model=axis({"rotary": ("bma+g1+g3", "rotary"), "learned": ("none", "learned")}),
    arrange=axis({"scan": with_stacked_blocks, "loop": lambda params: params}),
)
def test_tokens_in_chunks_with_caches_equal_all_at_once(model, arrange):
    gate, positions = model
    options = {"gate": gate, "positions": positions, "num_kv_heads": 2, "window": 4}
    config, params = make(**options)
    tokens = sample(2, 9)
    caches = init_caches(config, batch=2, max_length=11, dtype=jnp.float64)
    caches = stack_layers(caches) if arrange is with_stacked_blocks else caches
    chunks = []
    for chunk in (tokens[:, :3], tokens[:, 3:6], tokens[:, 6:]):
        logits, caches = apply_cached(arrange(params), chunk, config=config, caches=caches)
        chunks.append(logits)
    assert_close(np.concatenate(chunks, axis=1), logits_of_torch(tokens, **options))


def test_the_last_logits_alone_are_the_last_of_all():
    config, params = make(num_layers=1)
    tokens = sample(2, 6)
    assert_close(apply(params, tokens, config=config, num_logits=2), logits_of_torch(tokens, num_layers=1)[:, -2:])


def test_segments_count_learned_positions_anew():
    # A row may be longer than the table, if no segment is.
    options = {"positions": "learned", "gate": "bma+g1", "max_length": 3}
    config, params = make(**options)
    tokens = sample(1, 7)
    ids = jnp.array([[4, 4, 4, 1, 1, 9, 9]])
    alone = [logits_of_torch(tokens[:, start:end], **options) for start, end in ((0, 3), (3, 5), (5, 7))]
    assert_close(apply(params, tokens, config=config, segment_ids=ids), np.concatenate(alone, axis=1))


def test_in_half_precision_gates_keep_single_precision():
    config, params = make(gate="bma+g1", num_layers=1)
    half = jit_quickly(partial(cast_params, dtype=jnp.bfloat16))(params)
    for name, array in named(half).items():
        assert array.dtype == (jnp.float32 if "attn_gate" in name else jnp.bfloat16)
    tokens = sample(2, 9)
    logits, exact = apply(half, tokens, config=config), logits_of_torch(tokens, gate="bma+g1", num_layers=1)
    assert logits.dtype == jnp.bfloat16
    assert np.linalg.norm(logits - exact) < 0.05 * np.linalg.norm(exact)
    assert cast_params(params, None) is params


def test_dropout_needs_a_key_and_a_share():
    config, params = make(num_layers=1)
    tokens = sample(2, 5)
    plain = logits_of_torch(tokens, num_layers=1)
    assert_close(apply(params, tokens, config=config, dropout_key=key()), plain)
    for options in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        dropping = replace(config, **options)
        assert_close(apply(params, tokens, config=dropping), plain)
        first, again, other = (apply(params, tokens, config=dropping, dropout_key=key(seed)) for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.allclose(first, other)
        assert not np.allclose(first, plain)


def test_dropout_keeps_the_mean():
    x = jnp.ones((100, 100), jnp.float32)
    dropped = np.asarray(jit_quickly(lambda x: drop(x, 0.25, key()))(x))
    assert dropped.dtype == jnp.float32
    assert set(np.unique(dropped).tolist()) == {0.0, float(jnp.float32(1) / jnp.float32(0.75))}
    assert abs(dropped.mean() - 1) < 0.02


def test_what_lies_beyond_a_table_is_not_a_number():
    config, params = make(positions="learned", max_length=8, num_layers=1)
    tokens = np.array([[1, 30, 2], [1, 31, 2]])
    inside = np.array([[1, 30, 2], [0, 0, 0]])
    for stray in (31, 5000, -1, -31):
        tokens[1, 1] = stray
        assert np.isnan(apply(params, tokens, config=config)).any((1, 2)).tolist() == [False, True]
    for stray in (8, -1, -8):
        found = apply(params, inside, config=config, positions=np.array([[5, 6, 7], [6, 7, stray]]))
        assert np.isnan(found).any((1, 2)).tolist() == [False, True]


REJECTED = [
    ({"tokens": jnp.zeros((2, 3))}, "tokens"),
    ({"tokens": jnp.zeros(3, int)}, "tokens"),
    ({"tokens": sample(1, 17)}, "tokens"),
    ({"positions": jnp.arange(2)}, "positions"),
    ({"num_logits": 0}, "num_logits"),
    ({"segment_ids": jnp.zeros((2, 2), int)}, "segment_ids"),
    ({"caches": []}, "caches"),
    ({"mask": jnp.ones((5, 5), bool)}, "mask"),
]


@pytest.mark.parametrize(("arguments", "field"), REJECTED)
def test_what_makes_no_sense_is_rejected_by_name_while_tracing(arguments, field):
    config = TransformerConfig(**SIZES | {"max_length": 16}, positions="learned")
    given = {"tokens": sample(2, 3)} | arguments
    tokens, function = given.pop("tokens"), apply_model_cached if "caches" in given else apply_model
    with rejects(field):
        jax.eval_shape(lambda: function(init_model(jax.random.key(0), config), tokens, config, **given))


@pytest.mark.parametrize(("array", "stray"), [(np.array, 31), (jnp.array, 5000), (jnp.array, -1)])
def test_concrete_tokens_outside_the_vocabulary_are_rejected_in_words(stray, array):
    config = TransformerConfig(**SIZES)
    with rejects("tokens", hint="tokenizer"):
        apply_model({}, array([[1, stray]]), config)


def test_learned_positions_end_where_their_table_ends_with_a_cache_too():
    config, params = make(positions="learned", max_length=16, num_layers=1)
    caches = init_caches(config, batch=1, max_length=20, dtype=jnp.float64)
    _, caches = apply_cached(params, sample(1, 16), config=config, caches=caches)
    with rejects("tokens", hint="positions='rotary'"):
        apply_model_cached(params, sample(1, 1), config, caches=caches)


def test_caches_are_stacked_like_the_blocks():
    config, params = make()
    caches = init_caches(config, batch=1, max_length=3, dtype=jnp.float64)
    stacked = with_stacked_blocks(params)
    for blocks, wrong in ((params, stack_layers(caches)), (params, caches[0]), (stacked, caches)):
        with pytest.raises(TypeError, match=r"^caches must be"):
            apply_model_cached(blocks, sample(1, 2), config, caches=wrong)
    with rejects("caches"):
        apply_model_cached(stacked, sample(1, 2), config, caches=stack_layers([*caches, caches[0]]))
    with pytest.raises(TypeError, match=r"^tokens must be an array"):
        apply_model(params, [[1]], config)


@pytest.mark.parametrize(
    ("change", "stacked"), [({"gate": "none"}, False), ({"tie_embeddings": False}, True), ({"num_layers": 3}, True)]
)
def test_parameters_of_another_configuration_are_rejected(change, stacked):
    config, params = make(gate="bma")
    params = with_stacked_blocks(params) if stacked else params

    def shapes(config):
        return jax.eval_shape(lambda params, tokens: apply_model(params, tokens, config), params, sample(1, 3))

    assert shapes(config).shape == (1, 3, 31)
    with pytest.raises(ValueError, match=r"^params do not fit the configuration: "):
        shapes(replace(config, **change))
