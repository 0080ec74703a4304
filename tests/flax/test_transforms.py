"""What JAX does to a layer: compile, differentiate, map, scan, recompute, and run in half precision."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from jax_layers import GROUPED, as_params, as_tensor, every_combination, largest_gap, make, quick_jit, rounding, sample
from torch_layers import OPTIONS

from tidegate.flax import gated_attention

ALL_SITES = "g1+g2+g3+g4+g5"
ALL_QUERIES = "output:query+value:query+key:query+query:query"
EVERYTHING = OPTIONS["everything"]
some_gates = pytest.mark.parametrize("gate", ["none", ALL_SITES, ALL_QUERIES])
both_precisions = pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])


def total(layer, x):
    return lambda params: (layer.under(params)(x) ** 2).sum()


def assert_trees_close(actual, expected, *, what="gradient"):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(assert_close, what=what), actual, expected)


@both_precisions
def test_a_layer_as_the_compiler_comes_is_the_layer_compiled_quickly(dtype):
    layer, x = make(ALL_SITES, **EVERYTHING, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    compiled = jax.jit(gated_attention, static_argnames=("config", "is_causal"))
    y = compiled(layer.params, x, config=layer.config, is_causal=True)
    assert (y.shape, y.dtype) == ((2, 5, 24), dtype)
    assert_close(y, quick_jit(layer)(x))


def test_a_layer_runs_without_being_compiled_as_a_whole():
    layer, x = make("g1+bma", dtype=jnp.float32), sample(2, 5, 24, dtype=jnp.float32)
    assert_close(layer(x), quick_jit(layer)(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_needs_no_numbers_of_64_bits(dtype):
    layer, x = make(ALL_SITES, **EVERYTHING, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    mask = sample(2, 1, 5, 5, seed=3, dtype=np.float32)

    def run(x):
        return layer(x, mask=mask, positions=np.arange(5)), layer(x, cache=layer.cache(2, 6))[0]

    with jax.enable_x64(False):
        narrow = quick_jit(run)(x)
    for found, expected in zip(narrow, (layer.by_torch(x, mask=mask), layer.by_torch(x)), strict=True):
        assert found.dtype == dtype
        assert largest_gap(found, expected) <= rounding(dtype, expected)


def test_options_that_are_equal_are_compiled_once():
    layer, same, other = make("g1+bma"), make("output:input+value:query"), make("g1")
    traces = []

    @partial(jax.jit, static_argnums=2)
    def compiled(params, x, config):
        traces.append(str(config.gates))
        return gated_attention(params, x, config)

    for one in (layer, same, other, layer):
        jax.eval_shape(lambda x, one=one: compiled(one.params, x, one.config), sample(2, 5, 24))
    assert traces == ["bma+g1", "g1"]


def second_difference(function, x, u, step=1e-3):
    """Second derivative along u to fourth order in the step."""
    near = function(x + step * u) + function(x - step * u)
    far = function(x + 2 * step * u) + function(x - 2 * step * u)
    return (16 * near - far - 30 * function(x)) / (12 * step**2)


def slopes(layer):
    """First and second derivative along u, by forward mode in forward mode."""

    def slope(x, u):
        return jax.jvp(layer, (x,), (u,))[1]

    return lambda x, u: jax.jvp(lambda x: slope(x, u), (x,), (u,))


def slopes_of_torch(layer, x, u):
    """The same by PyTorch, of its plain arrays."""
    arrays, x, u = layer.torch_twin().arrays(), as_tensor(x), as_tensor(u)

    def slope(x):
        return torch.autograd.functional.jvp(arrays, x, u, create_graph=True)[1]

    return torch.autograd.functional.jvp(slope, x, u)


@every_combination
def test_forward_mode_of_both_orders_is_that_of_finite_differences(gate):
    # No norm of queries, which a gate that passes through 0 would divide by 0.
    layer = make(gate, num_kv_heads=2, rope=True, window=3, metric="learned")
    x, u = sample(1, 4, 24), sample(1, 4, 24, seed=1)
    first, second = quick_jit(slopes(layer))(x, u)
    run, step = layer.by_torch, 1e-5
    assert_close(first, (run(x + step * u) - run(x - step * u)) / (2 * step), what="finite difference")
    assert_close(second, second_difference(run, x, u), what="finite difference")


@some_gates
def test_forward_mode_of_both_orders_goes_through_the_fused_kernel(gate):
    layer = make(gate, **EVERYTHING, dtype=np.float32)
    x, u = (sample(1, 4, 24, seed=seed, dtype=np.float32) for seed in range(2))
    for found, expected in zip(quick_jit(slopes(layer))(x, u), slopes_of_torch(layer, x, u), strict=True):
        assert found.dtype == np.float32
        assert_close(found, expected, what="gradient")


def test_forward_and_reverse_mode_agree_in_both_orders():
    layer = make(ALL_QUERIES, **EVERYTHING)
    x, u, v, c = (sample(1, 3, 24, seed=seed) for seed in range(4))

    def value(x):
        return (layer(x) * c).sum()

    def both(x):
        by_forward = jax.jvp(lambda x: jax.jvp(value, (x,), (u,))[1], (x,), (v,))[1]
        by_reverse = (jax.grad(lambda x: (jax.grad(value)(x) * u).sum())(x) * v).sum()
        mixed = (jax.jvp(jax.grad(value), (x,), (u,))[1] * v).sum()
        return by_forward, by_reverse, mixed

    by_forward, by_reverse, mixed = quick_jit(both)(x)
    assert_close(by_forward, by_reverse, what="gradient")
    assert_close(mixed, by_reverse, what="gradient")


@both_precisions
def test_mapping_over_inputs_and_parameters_is_a_loop(dtype):
    layers = [make(ALL_SITES, seed=seed, **GROUPED, dtype=dtype) for seed in range(3)]
    layer, xs = layers[0], sample(3, 2, 5, 24, dtype=dtype)
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *(one.params for one in layers))
    mapped = quick_jit(jax.vmap(lambda params, x: layer.under(params)(x)))(stacked, xs)
    assert_close(mapped, np.stack([one.by_torch(x) for one, x in zip(layers, xs, strict=True)]))
    assert_close(quick_jit(jax.vmap(layer))(xs), np.stack([layer.by_torch(x) for x in xs]))


def torch_gradients(layer, x):
    """The gradients of the sum of squares by the parameters of the PyTorch layer."""
    twin = layer.torch_twin()
    (twin(as_tensor(x)) ** 2).sum().backward()
    return as_params({name: array.grad for name, array in twin.named_parameters()}, twin.shape.head_dim)


def test_gradients_of_each_example_are_a_loop():
    layer, xs = make(ALL_SITES, **EVERYTHING), sample(3, 1, 5, 24)

    def gradient(params, x):
        return jax.grad(total(layer, x))(params)

    each = quick_jit(jax.vmap(gradient, in_axes=(None, 0)))(layer.params, xs)
    for row, x in enumerate(xs):
        assert_trees_close(jax.tree.map(lambda array, row=row: array[row], each), torch_gradients(layer, x))


def test_a_mask_is_mapped_over_with_its_row():
    layer, x, masks = make("g1+bma"), sample(1, 5, 24), sample(3, 5, 5, seed=2) > 0
    mapped = quick_jit(jax.vmap(lambda mask: layer(x, mask=mask)))(masks)
    assert_close(mapped, np.stack([layer.by_torch(x, mask=mask) for mask in masks]))


@some_gates
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_exact_up_to_rounding(gate, dtype):
    """The expected numbers are those of the PyTorch layer in float64, given what the roundings to half left."""
    layer, x = make(gate, **EVERYTHING, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    y, expected = quick_jit(layer)(x), layer.by_torch(x)
    assert y.dtype == dtype
    assert largest_gap(y, expected) <= rounding(dtype, expected)


@cache
def layer_and_gradients(dtype):
    """A layer with all that it may have, and the compiled function that gives the gradients of its sum."""
    layer, x = make(ALL_SITES, **EVERYTHING, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    return layer, quick_jit(jax.value_and_grad(lambda params: layer.under(params)(x).astype(np.float32).sum()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_dtype_of_the_parameters_and_are_finite(dtype):
    layer, differentiated = layer_and_gradients(dtype)
    _, found = differentiated(layer.params)
    assert {array.dtype for array in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(found))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_masks_and_caches_work(dtype):
    layer, x = make("g1+bma", **EVERYTHING, dtype=dtype), sample(2, 5, 24, dtype=dtype)
    mask = np.where(sample(2, 1, 5, 5, seed=3) > 0, 0, -np.inf).astype(np.float32)

    expected = layer.by_torch(x, mask=mask)
    for y in quick_jit(lambda x: (layer(x, mask=mask), layer(x, mask=mask, cache=layer.cache(2, 5))[0]))(x):
        assert y.dtype == dtype
        assert largest_gap(y, expected) <= rounding(dtype, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_very_large_logits_stay_finite(dtype):
    layer, differentiated = layer_and_gradients(dtype)
    size = float(jnp.finfo(dtype).max) ** 0.5 / 10
    large = {**layer.params, "attn_gate": jax.tree.map(lambda a: (a * size).astype(dtype), layer.params["attn_gate"])}
    y, gradients = differentiated(large)
    assert np.isfinite(y)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(gradients))
