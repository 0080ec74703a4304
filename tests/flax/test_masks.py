import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close
from covers import axis, over
from jax_layers import make, quick_jit, sample

IDS = np.array([[5, 5, 2, 2, 2], [0, 1, 1, 1, 0]])


def test_no_gradient_crosses_from_segment_to_segment():
    layer, x = make("g1+bma+g3", causal=False, rope=True), sample(2, 5, 24)
    summed = quick_jit(jax.jacrev(lambda x: layer(x, segment_ids=IDS).sum(axis=-1)))(x)
    together = IDS[:, :, None] == IDS[:, None, :]
    for b in range(2):
        reach = abs(summed[b, :, b]).max(axis=-1)
        assert ((reach > 0) == together[b]).all()


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
