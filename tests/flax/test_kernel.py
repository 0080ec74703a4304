from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, naming
from covers import axis, over
from errors import rejects
from jax_layers import every_precision, key, largest_gap, quick_jit, rounding, sample

from tidegate.flax import kernel
from tidegate.flax.kernel import attend
from tidegate.tensors.attention import attention_weights

SCALE = 0.4
LIMITS = {"all": {}, "causal": {"causal": True}, "causal window": {"causal": True, "window": 3}, "band": {"window": 2}}
KINDS = ("bool", "additive")
BLOCK = axis({"in one": None, "blocks of 1": 1, "blocks of 2": 2, "blocks of 3": 3}, "blocks of 2")
"""Queries in blocks of every kind that five positions have, as long ones are; None leaves them whole."""
PRECISION = axis(
    {dtype.dtype.name: dtype for dtype in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16)}, "float32"
)
both_paths = pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32], ids=["plain", "fused"])


def heads(*, T=5, S=5, H=4, G=2, dtype=jnp.float64):
    return sample(2, T, H, 6, dtype=dtype), *(sample(2, S, G, 6, seed=seed, dtype=dtype) for seed in (1, 2))


def as_given(mask, kind, dtype):
    """A bool mask as the argument of its kind."""
    return {"mask": mask} if kind == "bool" else {"bias": np.where(mask, 0, -np.inf).astype(dtype)}


def attended(q, k, v, **options):
    return quick_jit(lambda q, k, v: attend(q, k, v, scale=SCALE, **options))(q, k, v)


def attended_each(q, k, v, rows):
    """What each row of options gives, compiled together: most of the time of so small a function is its start."""
    return quick_jit(lambda q, k, v: [attend(q, k, v, scale=SCALE, **options) for options in rows])(q, k, v)


def expected_output(q, k, v, *, allowed=None, bias=0.0):
    """Attention head by head in float64, from the weights of the tensors."""
    q, k, v = (np.moveaxis(np.asarray(x, np.float64), 1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    weights = attention_weights(SCALE * q @ np.swapaxes(k, -1, -2) + np.asarray(bias, np.float64), allowed)
    return np.moveaxis(weights @ v, 1, 2)


def band(T, S, *, causal=False, window=None):
    distance = np.arange(T)[:, None] - np.arange(S)
    near = np.ones((T, S), bool) if window is None else abs(distance) < window
    return near & (distance >= 0) if causal else near


def cut_into_blocks(monkeypatch, length):
    if length is not None:
        monkeypatch.setattr(kernel, "_SHORTEST_BLOCK", min(length, 2))
        monkeypatch.setattr(kernel, "_LONGEST_BLOCK", length)
        monkeypatch.setattr(kernel, "_WINDOW_BLOCKS", ())
        monkeypatch.setattr(kernel, "_LARGEST_WINDOW_BLOCK", length)


@pytest.fixture(
    params=["plain", "in one", pytest.param("blocks of 1", marks=pytest.mark.full), *list(BLOCK.values)[2:]]
)
def dtype_of_way(request, monkeypatch):
    """The dtype for each way that a call may go: the plain path, which has no blocks, or the fused one, with each.

    Blocks of 1 are so many that they take longest to compile; without `--full` the tests of gradients have them.
    """
    cut_into_blocks(monkeypatch, BLOCK.values.get(request.param))
    return jnp.float64 if request.param == "plain" else jnp.float32


@every_precision
@pytest.mark.parametrize("restricted", [False, True])
def test_float64_and_dropout_take_the_plain_path_and_all_else_the_fused_one(monkeypatch, dtype, restricted):
    paths = []

    def spy(module, name, path):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **options: paths.append(path) or function(*given, **options))

    spy(jax.nn, "dot_product_attention", "fused")
    spy(kernel, "attend_plainly", "plain")
    q, k, v = heads(dtype=dtype)
    masks = {"mask": np.ones((1, 1, 5, 5), bool), "bias": np.zeros((1, 1, 5, 5), dtype)} if restricted else {}
    fused = "plain" if dtype == jnp.float64 else "fused"
    for options, expected in (
        ({}, fused),
        ({"causal": True, "window": 2}, fused),
        ({"dropout": 0.1, "dropout_key": jax.random.key(0)}, "plain"),
        ({"dropout": 0.0, "dropout_key": jax.random.key(0)}, fused),
    ):
        paths.clear()
        shape = jax.eval_shape(lambda q, k, v, o=options: attend(q, k, v, scale=SCALE, **masks, **o), q, k, v)
        assert paths == [expected]
        assert (shape.shape, shape.dtype) == (q.shape, q.dtype)


@over(
    dtype=axis({"plain": jnp.float64, "fused": jnp.float32}, "fused"),
    G=axis([2, 4, 1]),
    lengths=axis([(5, 100), (1, 63)]),
)
def test_attention_is_that_of_the_tensors(dtype, G, lengths):
    T, S = lengths
    q, k, v = heads(T=T, S=S, G=G, dtype=dtype)
    assert_close(attended(q, k, v), expected_output(q, k, v))


def test_every_limit_is_a_mask(dtype_of_way):
    q, k, v = heads(dtype=dtype_of_way)
    for (name, limits), o in zip(LIMITS.items(), attended_each(q, k, v, LIMITS.values()), strict=True):
        with naming(name):
            assert_close(o, expected_output(q, k, v, allowed=band(5, 5, **limits)))


def test_masks_and_limits_combine(dtype_of_way):
    q, k, v = heads(dtype=dtype_of_way)
    mask = sample(2, 4, 5, 5, seed=3) > 0
    rows = list(product(KINDS, LIMITS.values()))
    found = attended_each(q, k, v, [as_given(mask, kind, dtype_of_way) | limits for kind, limits in rows])
    for (kind, limits), o in zip(rows, found, strict=True):
        with naming((kind, limits)):
            assert_close(o, expected_output(q, k, v, allowed=mask & band(5, 5, **limits)))


def test_a_bias_is_added_to_the_scores(dtype_of_way):
    q, k, v = heads(dtype=dtype_of_way)
    bias, mask = 3 * sample(2, 4, 5, 5, seed=4, dtype=dtype_of_way), sample(2, 1, 5, 5, seed=5) > -0.5
    found = attended_each(q, k, v, [{"bias": bias, "mask": mask} | limits for limits in LIMITS.values()])
    for (name, limits), o in zip(LIMITS.items(), found, strict=True):
        with naming(name):
            assert_close(o, expected_output(q, k, v, allowed=mask & band(5, 5, **limits), bias=bias))


def test_masks_broadcast(dtype_of_way):
    q, k, v = heads(dtype=dtype_of_way)
    shapes = ((1, 4, 5, 1), (1, 1, 1, 1), (2, 1, 1, 5), (1, 1, 5, 5))
    rows = [(kind, sample(*shape, seed=7) > 0) for kind, shape in product(KINDS, shapes)]
    found = attended_each(q, k, v, [{"causal": True} | as_given(mask, kind, dtype_of_way) for kind, mask in rows])
    for (kind, mask), o in zip(rows, found, strict=True):
        with naming((kind, mask.shape)):
            assert_close(o, expected_output(q, k, v, allowed=mask & band(5, 5, causal=True)))


@over(
    block_length=BLOCK,
    dtype=PRECISION,
    kind=axis(KINDS),
    limits=axis({name: LIMITS[name] for name in ("all", "causal window")}, "causal window"),
)
def test_a_row_that_sees_nothing_gives_zero_with_gradient_zero(monkeypatch, block_length, dtype, kind, limits):
    """By itself, and where causality or the window takes the only key that the mask leaves."""
    cut_into_blocks(monkeypatch, block_length)
    mask = np.ones((2, 4, 5, 5), bool)
    mask[0, :, 2] = False
    mask[1, 1, 0] = [False, False, False, False, True]
    q, k, v = heads(dtype=dtype)
    empty = ~(mask & band(5, 5, **limits)).any(axis=-1)
    assert empty[0, :, 2].all()
    assert empty[1, 1, 0] == bool(limits)

    def forward(q, k, v):
        return attend(q, k, v, **as_given(mask, kind, dtype), scale=SCALE, **limits)

    def of_rows(rows, *arrays):
        o, back = jax.vjp(forward, *arrays)
        return o, back(jnp.swapaxes(rows, 1, 2)[..., None] * jnp.ones_like(o))

    differentiated = quick_jit(of_rows)
    o, by_empty = differentiated(empty.astype(dtype), q, k, v)
    assert (np.swapaxes(o, 1, 2)[empty] == 0).all()
    assert all((gradient == 0).all() for gradient in by_empty)
    _, by_all = differentiated(np.ones_like(empty, dtype), q, k, v)
    assert np.isfinite(o).all()
    assert all(np.isfinite(gradient).all() for gradient in by_all)
    assert (np.swapaxes(by_all[0], 1, 2)[empty] == 0).all()


@both_paths
def test_a_row_beyond_the_window_of_every_key_sees_nothing(dtype):
    q, k, v = heads(T=5, S=2, dtype=dtype)
    o = attended(q, k, v, window=2)
    assert_close(o, expected_output(q, k, v, allowed=band(5, 2, window=2)))
    assert (o[:, 3:] == 0).all()


@every_precision
def test_the_most_negative_bias_does_not_fall_below_what_is_forbidden(dtype):
    """A row whose keys are all that low shares its weight among them; none goes to a key that it may not see."""
    q, k, v = heads(G=1, dtype=dtype)
    bias = np.zeros((1, 1, 5, 5), dtype)
    bias[..., :3] = jnp.finfo(dtype).min
    later = v.copy()
    later[:, 3:] = 7
    limits = ({"causal": True}, {"mask": band(5, 5, causal=True)})
    both = quick_jit(lambda v: [attend(q, k, v, bias=bias, scale=SCALE, **options) for options in limits])
    expected = expected_output(q, k, v, allowed=band(5, 5, causal=True), bias=bias)
    for o, with_later in zip(both(v), both(later), strict=True):
        assert largest_gap(o, expected) <= rounding(dtype, expected)
        assert (with_later[:, :3] == o[:, :3]).all()


@both_paths
def test_a_nan_in_the_bias_is_not_taken_for_forbidden(dtype):
    bias = np.zeros((1, 1, 5, 5), dtype)
    bias[..., 2, 1] = np.nan
    bias[..., 3, 4] = np.nan
    o = attended(*heads(dtype=dtype), bias=bias, causal=True)
    assert np.isnan(o[:, 2]).all()
    assert np.isfinite(o[:, [0, 1, 3, 4]]).all()


@pytest.mark.parametrize("T", [127, 128, 600, 2048, 2500, 20_000])
@pytest.mark.parametrize(
    ("limits", "reach"),
    [
        ({"causal": True}, 20_000),
        ({"causal": True, "window": 70}, 69),
        ({"window": 70}, 138),
        ({"window": 9000}, 17_998),
    ],
)
def test_long_queries_are_attended_in_few_calls_with_no_key_that_none_of_them_sees(monkeypatch, T, limits, reach):
    calls = []

    def counted(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1]))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", counted)
    # What is traced here with another kernel must not be remembered.
    monkeypatch.setattr(kernel, "_attend_in_turn", kernel._attend_in_turn.__wrapped__)
    q, k, v = heads(T=T, S=T, dtype=jnp.float32)
    jax.eval_shape(lambda q, k, v: attend(q, k, v, scale=SCALE, **limits), q, k, v)
    assert len(calls) == 1 if T < 128 else len(calls) <= 16
    assert all(queries <= max(512, T / 16) for queries, _ in calls)
    assert all(keys <= min(T, queries + reach) for queries, keys in calls)
    if limits == {"causal": True}:
        assert sum(keys for _, keys in calls) <= T * (len(calls) + 2) / 2


@pytest.mark.parametrize(
    "T", [pytest.param(1, marks=pytest.mark.full), 63, pytest.param(100, marks=pytest.mark.full), 300]
)
def test_windows_and_documents_at_odd_lengths_are_masks(T):
    q, k, v = heads(T=T, S=T, dtype=jnp.float32)
    # Documents of one position, of two, and of all that is left.
    ids = np.array([0, 1, 2, 2] + [3] * 300)[:T]
    documents = (ids[:, None] == ids)[None, None]
    each = ({"window": 1}, {"window": 70}, {"window": 400}, {"window": 70, "mask": documents})
    rows = [{"causal": causal} | options for causal, options in product((True, False), each)]
    for options, o in zip(rows, attended_each(q, k, v, rows), strict=True):
        allowed = band(T, T, causal=options["causal"], window=options["window"])
        with naming(options):
            assert_close(o, expected_output(q, k, v, allowed=allowed & options.get("mask", True)))


def with_column(q, k, v, sink, *, allowed):
    """Attention of ungrouped heads beside a sink, as a softmax with one more column."""
    scores = jnp.where(allowed, SCALE * jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf)
    column = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate((scores, column), axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def test_the_gradient_of_a_sink_with_hardly_any_weight_is_no_rounding_error():
    arrays = (*heads(H=4, G=4), jnp.full(4, -20.0))

    def by_sink(*arrays):
        return jax.grad(lambda *x: (attend(*x[:3], scale=SCALE, sink=x[3]) ** 2).sum(), argnums=3)(*arrays)

    exact = by_sink(*(x.astype(jnp.float64) for x in arrays))
    assert (abs(exact) > 1e-12).all()
    np.testing.assert_allclose(by_sink(*(x.astype(jnp.float32) for x in arrays)), exact, rtol=1e-3)


@pytest.mark.parametrize(("block_length", "dtype"), [(None, jnp.float64), (1, jnp.float32)], ids=["plain", "blocks"])
def test_a_sink_is_one_more_column_of_the_softmax_in_derivatives_of_both_orders(monkeypatch, block_length, dtype):
    cut_into_blocks(monkeypatch, block_length)
    allowed = band(5, 5, causal=True, window=3)
    allowed[2] = False
    arrays = [x.astype(dtype) for x in (*heads(H=4, G=4), sample(4, seed=3))]

    def derivatives(*arrays):
        results = []
        for function in (
            lambda *x: attend(*x[:3], mask=allowed[None, None], causal=True, window=3, scale=SCALE, sink=x[3]),
            lambda *x: with_column(*x, allowed=allowed),
        ):
            slopes = jax.grad(lambda *x, f=function: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3))
            results.append((function(*arrays), *jax.jvp(slopes, arrays, arrays)))
        return results

    ours, expected = quick_jit(derivatives)(*arrays)
    assert_close(ours[0], expected[0])
    assert (ours[0][:, 2] == 0).all()
    for own, other in zip(jax.tree.leaves(ours[1:]), jax.tree.leaves(expected[1:]), strict=True):
        assert_close(own, other, what="gradient")


@both_paths
def test_very_large_scores_attend_to_one_key(dtype):
    q, k, v = heads(G=4, dtype=dtype)

    def total(q, size):
        o = attend(size * q, k, v, scale=SCALE)
        return o.sum(), o

    differentiated = quick_jit(jax.grad(total, has_aux=True))
    chosen = np.einsum("bthd,bshd->bths", q, k).argmax(axis=-1)
    for size in (1e4, 1e8):
        by_q, o = differentiated(q, dtype(size))
        assert_close(o, np.take_along_axis(v, chosen[..., None], axis=1))
        assert np.isfinite(by_q).all()


def gradients_of(dtype):
    """By queries, keys, values and bias, under a mask, causality and a window."""
    *arrays, mask = *heads(), sample(2, 4, 5, 5, seed=4), sample(2, 1, 5, 5, seed=3) > -1

    def total(q, k, v, bias):
        return (attend(q, k, v, mask=mask, bias=bias, causal=True, window=3, scale=SCALE) ** 2).sum()

    return quick_jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*(array.astype(dtype) for array in arrays))


@pytest.fixture(scope="module")
def plain_gradients():
    return gradients_of(jnp.float64)


@pytest.mark.parametrize("block_length", BLOCK.values.values(), ids=BLOCK.values)
def test_both_paths_have_the_same_gradients(monkeypatch, plain_gradients, block_length):
    cut_into_blocks(monkeypatch, block_length)
    for fused, plain in zip(gradients_of(jnp.float32), plain_gradients, strict=True):
        assert fused.dtype == np.float32
        assert_close(fused, plain, what="gradient")


def dropped_weights(*keys, dropout=0.25, dtype=jnp.float32, T=64, S=64, **options):
    """Weights after dropout by each key, by values that are the unit vectors; first those without dropout."""
    q, k = sample(1, T, 2, S, dtype=dtype), sample(1, S, 2, S, seed=1, dtype=dtype)
    v = np.broadcast_to(np.eye(S, dtype=dtype)[None, :, None], k.shape)

    def run(key):
        noisy = attend(q, k, v, scale=SCALE, dropout=dropout, dropout_key=key, **options)
        return attend(q, k, v, scale=SCALE, **options), noisy

    compiled = quick_jit(run)
    results = [compiled(key) for key in keys]
    return results[0][0], *(noisy for _, noisy in results)


@both_paths
def test_dropout_drops_weights_and_enlarges_the_others_by_its_law(dtype):
    whole, noisy = dropped_weights(jax.random.key(0), dtype=dtype, causal=True)
    kept = noisy != 0
    assert_close(noisy, np.where(kept, whole / 0.75, 0))
    seen = np.broadcast_to(band(64, 64, causal=True)[None, :, None], whole.shape)
    assert not kept[~seen].any()
    # Each of n weights stays with probability 3/4.
    n = seen.sum()
    assert abs(kept[seen].mean() - 0.75) < 6 * (0.75 * 0.25 / n) ** 0.5


def test_dropout_is_the_keys():
    _, first, again, other = dropped_weights(key(0), key(0), key(1), T=4, S=4)
    assert (first == again).all()
    assert (first != other).any()


def test_dropout_needs_a_key():
    with rejects("dropout_key"):
        attended(*heads(), dropout=0.5)


@over(dtype=PRECISION, lengths=axis([(3, 0), (0, 0), (0, 3)]))
def test_no_queries_give_nothing_and_no_keys_give_zero(dtype, lengths):
    T, S = lengths
    q, k, v = heads(T=T, S=S, dtype=dtype)
    o = attended(q, k, v, mask=np.ones((1, 1, 1, S), bool))
    assert (o.shape, o.dtype) == ((2, T, 4, 6), dtype)
    assert (o == 0).all()
