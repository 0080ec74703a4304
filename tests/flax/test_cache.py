import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects
from jax_layers import COMBINED, largest_gap, make, quick_jit, sample
from torch_layers import OPTIONS

from tidegate import HeadShape
from tidegate.flax import KVCache, init_cache

SHAPE = HeadShape(d_model=24, num_heads=4, num_kv_heads=2, head_dim=6)
ALL_SITES = "g1+g2+g3+g4+g5"


@pytest.mark.parametrize("max_length", [0, -1])
def test_room_is_at_least_one_position(max_length):
    with rejects("max_length"):
        init_cache(SHAPE, batch=1, max_length=max_length)


def as_shapes(tree):
    return jax.tree.map(lambda array: (array.shape, jnp.dtype(array.dtype)), tree)


@over(gate=axis(COMBINED, ALL_SITES), options=axis({name: OPTIONS[name] for name in ("everything", "plain")}))
def test_no_gate_makes_the_cache_hold_more(gate, options):
    """The cache is that of plain attention, before a step and after, whatever the gate."""
    layer = make(gate, **options)
    before = layer.cache(2, 9)
    y, after = jax.eval_shape(lambda x: layer(x, cache=before), sample(2, 3, 24))
    assert y.shape == (2, 3, 24)
    assert as_shapes(after) == as_shapes(before) == as_shapes(layer.ungated().cache(2, 9))
    shape = layer.config.shape
    assert before.key.size + before.value.size == 2 * 2 * 9 * shape.num_kv_heads * shape.head_dim


def test_one_compiled_step_serves_every_length():
    layer, x = make("g1+bma", **OPTIONS["everything"]), sample(2, 6, 24)
    traces = []

    def step(part, cache):
        traces.append(part.shape)
        return layer(part, cache=cache)

    compiled, cache, outputs = quick_jit(step), layer.cache(2, 6), []
    for t in range(6):
        y, cache = compiled(x[:, t : t + 1], cache)
        outputs.append(y)
    assert traces == [(2, 1, 24)]
    assert_close(np.concatenate(outputs, axis=1), layer.by_torch(x))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_scan_over_positions_is_the_whole_at_once(dtype):
    layer, x = make(ALL_SITES, **OPTIONS["everything"], dtype=dtype), sample(2, 6, 24, dtype=dtype)

    def decode(x):
        def step(cache, x_BM):
            y, cache = layer(x_BM[:, None], cache=cache)
            return cache, y[:, 0]

        cache, y_TBM = jax.lax.scan(step, layer.cache(2, 8), jnp.swapaxes(x, 0, 1))
        return cache.length, jnp.swapaxes(y_TBM, 0, 1)

    length, y = quick_jit(decode)(x)
    assert length == 6
    assert_close(y, layer.by_torch(x))


def test_what_lies_past_the_end_is_not_seen():
    layer, x = make("g1+bma", dtype=jnp.float32), sample(2, 2, 24, dtype=jnp.float32)
    clean = layer.cache(2, 5)
    dirty = KVCache(key=np.full_like(clean.key, np.nan), value=np.full_like(clean.value, 1e3), length=clean.length)
    step = quick_jit(lambda x, cache: layer(x, cache=cache)[0])
    assert (step(x, dirty._replace(key=clean.key)) == step(x, clean)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_half_precision_cache_serves_a_float32_layer(dtype):
    layer, x = make("g1+bma", dtype=jnp.float32), sample(2, 4, 24, dtype=jnp.float32)
    cache = init_cache(layer.config.shape, batch=2, max_length=4, dtype=dtype)
    y, after = quick_jit(lambda x: layer(x, cache=cache))(x)
    expected = layer.by_torch(x)
    assert (y.dtype, after.key.dtype, after.value.dtype) == (jnp.float32, dtype, dtype)
    assert largest_gap(y, expected) <= 8 * float(jnp.finfo(dtype).eps) * (1 + abs(expected).max())


def test_a_cache_that_overflows_says_how_much_is_needed():
    layer = make("bma")
    cache = layer.cache(2, 5)._replace(length=np.int32(3))
    with rejects("cache") as caught:
        jax.eval_shape(lambda x: layer(x, cache=cache), sample(2, 3, 24))
    assert (caught.value.expected, caught.value.got) == ("one with room for 6 positions", "max_length=5")
    # More than the whole room is noticed while the length is traced, too.
    with rejects("cache"):
        jax.eval_shape(lambda x, cache: layer(x, cache=cache), sample(2, 6, 24), layer.cache(2, 5))


@pytest.mark.parametrize(("batch", "num_kv_heads"), [(3, 2), (2, 4)])
def test_another_batch_or_layer_needs_another_cache(batch, num_kv_heads):
    layer = make("bma", num_kv_heads=num_kv_heads)
    cache = init_cache(SHAPE, batch=2, max_length=5)
    with rejects("cache", hint="Start a new cache"):
        jax.eval_shape(lambda x: layer(x, cache=cache), sample(batch, 3, 24))


def test_a_cache_maps_over_a_batch_of_rows_with_lengths_of_their_own():
    layer, x = make("g1+bma", rope=True), sample(2, 3, 24)
    caches = jax.tree.map(lambda array: np.stack([array] * 2), layer.cache(1, 4))
    held = quick_jit(lambda x: layer(x, cache=layer.cache(1, 4))[1])(x[:1, :2])
    caches = jax.tree.map(lambda stacked, own: np.stack([own, stacked[1]]), caches, held)
    step = quick_jit(jax.vmap(lambda x, cache: layer(x, cache=cache)))
    y, after = step(np.stack([x[:1, 2:], x[1:, :1]]), caches)
    assert after.length.tolist() == [3, 1]
    assert_close(y[0], layer.by_torch(x[:1])[:, 2:])
    assert_close(y[1], layer.by_torch(x[1:, :1]))


def test_an_overflow_that_cannot_be_rejected_is_nan_and_not_a_number_that_is_wrong():
    layer, x = make("bma"), sample(2, 4, 24)
    step = jax.jit(lambda x, cache: layer(x, cache=cache))
    first, cache = step(x, layer.cache(2, 6))
    second, _ = step(x, cache)
    assert jnp.isfinite(first).all()
    assert jnp.isnan(second).all()


def test_without_causality_the_last_chunk_sees_every_cached_position():
    layer, x = make("g1+bma", causal=False), sample(2, 5, 24)
    step = quick_jit(lambda x, cache: layer(x, cache=cache))
    _, cache = step(x[:, :3], layer.cache(2, 7))
    y, _ = step(x[:, 3:], cache)
    assert_close(y, layer.by_torch(x)[:, 3:])
