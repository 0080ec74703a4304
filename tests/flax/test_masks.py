from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects
from jax_layers import make, opening, quick_jit, sample
from torch_layers import OPTIONS

from tidegate.flax import KVCache
from tidegate.flax.masks import cached_mask, require_mask, segment_mask

SHAPE = (2, 4, 3, 5)
IDS = np.array([[5, 5, 2, 2, 2], [0, 1, 1, 1, 0]])


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (1, 1), (2, 1, 3, 5), (1, 4, 1, 1), SHAPE])
@pytest.mark.parametrize("dtype", [np.bool_, np.float32, jnp.bfloat16])
def test_a_mask_gets_all_four_axes(shape, dtype):
    mask = np.ones(shape, dtype)
    given = require_mask(mask, SHAPE)
    assert (given.shape, given.dtype) == ((1,) * (4 - len(shape)) + shape, dtype)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.complex64])
def test_a_mask_of_another_kind_is_rejected(dtype):
    message = (
        f"mask must be bool (True = attend) or floating (added to the scores), got {np.dtype(dtype)}. "
        "Compare it, as in mask != 0."
    )
    with pytest.raises(TypeError, match=opening(message)):
        require_mask(np.ones((3, 5), dtype), SHAPE)
    layer = make("g1")
    with pytest.raises(TypeError, match=opening(message)):
        jax.eval_shape(lambda x, mask: layer(x, mask=mask), sample(2, 3, 24), np.ones((3, 3), dtype))


@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 5), (4, 3, 5), (3, 4, 3, 5), (1, 2, 4, 3, 5), (2, 4, 5, 3)])
def test_a_mask_of_another_shape_is_rejected(shape):
    with rejects("mask", hint="mask[:, None, None, :]"):
        require_mask(np.ones(shape, bool), SHAPE)
    layer = make("g1", causal=False)
    context = sample(2, 5, 24)
    with rejects("mask"):
        jax.eval_shape(lambda x: layer(x, context=context, mask=np.ones(shape, bool)), sample(2, 3, 24))


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_segment_ids_are_integers(dtype):
    with pytest.raises(TypeError, match=opening(f"segment_ids must be integers, got {np.dtype(dtype)}.")):
        segment_mask(IDS.astype(dtype), batch=2, num_positions=5)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 4), (2, 5, 1)])
def test_segment_ids_are_one_for_each_position(shape):
    layer, x = make("g1"), sample(2, 5, 24)
    with rejects("segment_ids"):
        jax.eval_shape(lambda x: layer(x, segment_ids=np.zeros(shape, int)), x)


@pytest.mark.parametrize("options", [OPTIONS["everything"], OPTIONS["multi-query"]], ids=["causal", "bidirectional"])
def test_segments_are_rows_of_their_own(options):
    layer, x = make("g1+bma+g3", **options), sample(1, 5, 24)
    positions = np.array([0, 1, 0, 1, 2])
    packed = quick_jit(lambda x: layer(x, segment_ids=IDS[:1], positions=positions))(x)
    for part in (slice(0, 2), slice(2, 5)):
        assert_close(packed[:, part], layer.by_torch(x[:, part]))


def test_no_gradient_crosses_from_segment_to_segment():
    layer, x = make("g1+bma+g3", causal=False, rope=True), sample(2, 5, 24)
    summed = quick_jit(jax.jacrev(lambda x: layer(x, segment_ids=IDS).sum(axis=-1)))(x)
    together = IDS[:, :, None] == IDS[:, None, :]
    for b in range(2):
        reach = abs(summed[b, :, b]).max(axis=-1)
        assert ((reach > 0) == together[b]).all()


REACHES = list(product([True, False], [None, 1, 3], [(1, 1), (4, 1), (4, 3), (6, 6), (6, 2)]))


@pytest.fixture(scope="module")
def cached_masks():
    """The mask of each reach, compiled together."""
    cache = KVCache(key=np.zeros((1, 6, 1, 2)), value=np.zeros((1, 6, 1, 2)), length=np.int32(0))

    def each(lengths):
        return [
            cached_mask(cache._replace(length=length), num_queries=num_queries, causal=causal, window=window)
            for length, (causal, window, (_, num_queries)) in zip(lengths, REACHES, strict=True)
        ]

    lengths = [np.int32(length) for _, _, (length, _) in REACHES]
    return dict(zip(REACHES, quick_jit(each)(lengths), strict=True))


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_a_cached_position_is_seen_if_it_is_there_and_in_reach(cached_masks, reach):
    mask, (causal, window, (length, num_queries)) = cached_masks[reach], reach
    assert mask.shape == (1, 1, num_queries, 6)
    for i, j in np.ndindex(num_queries, 6):
        query = length - num_queries + i
        there = j <= query if causal else j < length
        assert mask[0, 0, i, j] == (there and (window is None or abs(query - j) < window))


@over(
    kind=axis(["bool", "additive"]),
    dtype=axis({"fused": jnp.float32, "plain": jnp.float64}),
    cached=axis({"whole": False, "cached": True}),
)
def test_a_row_that_sees_nothing_gives_the_bias_of_the_output_with_gradient_zero(kind, dtype, cached):
    layer, x = make("bma-query+bma", num_kv_heads=2, bias=True, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    mask = np.ones((2, 1, 5, 5), bool)
    mask[0, :, 1, :2] = False
    mask[1] = False
    given = mask if kind == "bool" else np.where(mask, 0, -np.inf).astype(dtype)
    empty = np.zeros((2, 5, 1), dtype)
    empty[0, 1] = empty[1] = 1

    def forward(params, x):
        own = layer.under(params)
        return own(x, mask=given, cache=own.cache(2, 5))[0] if cached else own(x, mask=given)

    def of_rows(rows, params, x):
        y, back = jax.vjp(forward, params, x)
        return y, back(rows * y)

    differentiated = quick_jit(of_rows)
    y, (by_params, by_x) = differentiated(empty, layer.params, x)
    assert (y[1] == layer.params["o_proj"]["bias"]).all()
    assert (y[0, 1] == layer.params["o_proj"]["bias"]).all()
    by_params["o_proj"].pop("bias")
    assert all((gradient == 0).all() for gradient in jax.tree.leaves((by_params, by_x)))
    _, finite = differentiated(np.ones_like(empty), layer.params, x)
    assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(finite))


def test_the_mask_has_a_gradient_of_its_own():
    layer, x, mask = make("bma"), sample(2, 5, 24), sample(2, 4, 5, 5, seed=6)
    mask[0, 0, 3] = -np.inf

    def total(mask):
        return (layer(x, mask=mask) * sample(2, 5, 24, seed=7)).sum()

    by_mask = quick_jit(jax.grad(total))(mask)
    ahead = np.triu(np.ones((5, 5), bool), 1)
    assert (by_mask[..., ahead] == 0).all()
    assert (by_mask[0, 0, 3] == 0).all()
    direction = np.where(np.isfinite(mask), sample(2, 4, 5, 5, seed=8), 0)
    step, value = 1e-6, quick_jit(total)
    slope = (value(mask + step * direction) - value(mask - step * direction)) / (2 * step)
    assert_close((by_mask * direction).sum(), slope, what="finite difference")
