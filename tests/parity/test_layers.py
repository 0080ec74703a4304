"""PyTorch layer, JAX layer and `tidegate.tensors`, given the same weights: values, and gradients of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from covers import axis, over
from jax_layers import COMBINED, GROUPED, as_params, every_combination, quick_jit, side_by_side, twin
from layers import CONTROLS, GATES
from torch_layers import OPTIONS, SPELLINGS, gradients, make, sample

from tidegate import PRESETS, Gates
from tidegate.flax import attention_arrays
from tidegate.torch import KVCache

WHAT = {torch.float64: "gradient", torch.float32: "forward"}
"""The rows of the table of tolerances that say 1e-10 in float64 and 2e-5 in float32, for gradients as for values."""

T = 5

DTYPE = axis(list(WHAT))
every_dtype = pytest.mark.parametrize("dtype", WHAT, ids=str)


def as_arrays(given):
    """Keyword arguments of the PyTorch layer as those of the JAX layer."""
    arrays = {name: tensor.detach().numpy() for name, tensor in given.items()}
    return {"segment_ids" if name == "documents" else name: array for name, array in arrays.items()}


def by_torch(layer, forward, x, given):
    """Values, and gradients by the inputs and by the tree of parameters."""
    inputs = [x, *(given[name] for name in ("context",) if name in given)]
    y = forward(x, **given)
    found = gradients(layer, y, *inputs)
    by_inputs = [found.pop(f"input {i}").numpy() for i in range(len(inputs))]
    return y.detach().numpy(), by_inputs, as_params(found, layer.shape.head_dim)


def by_jax(layer, x, given):
    own, given = twin(layer), as_arrays(given)
    weights = sample(*x.shape, seed=99, dtype=x.dtype).numpy()
    context = [given.pop("context")] if "context" in given else []

    def forward(inputs, params):
        across = dict(zip(["context"], inputs[1:], strict=False))
        y = own.under(params)(inputs[0], **across, **given)
        return (y * weights).sum(), y

    differentiated = quick_jit(jax.value_and_grad(forward, argnums=(0, 1), has_aux=True))
    (_, y), (by_inputs, by_params) = differentiated([x.detach().numpy(), *context], own.params)
    return y, by_inputs, by_params


def assert_same(own, expected, dtype):
    """Equal values, and equal gradients: each array in float64, all of them as one vector in float32.

    Under a norm a number per head moves nothing, so that its gradient is what large terms leave of each other.
    """
    assert jax.tree.structure(own) == jax.tree.structure(expected)
    (y, *found), (wanted_y, *wanted) = jax.tree.leaves(own), jax.tree.leaves(expected)
    assert {array.dtype.name for array in (y, *found)} == {str(dtype).removeprefix("torch.")}
    assert_close(y, wanted_y, what=WHAT[dtype])
    if dtype == torch.float32:
        found, wanted = ([np.concatenate([np.ravel(array) for array in arrays])] for arrays in (found, wanted))
    for gradient, expected_gradient in zip(found, wanted, strict=True):
        assert_close(gradient, expected_gradient, what=WHAT[dtype])


def assert_agree(layer, x, *, reference=None, **given):
    """Three ways to the same numbers; `reference` are the arguments of the tensors where they differ."""
    own = by_jax(layer, x, given)
    assert_same(own, by_torch(layer, layer, x, given), x.dtype)
    assert_same(own, by_torch(layer, layer.arrays(), x, given if reference is None else reference), x.dtype)


def inputs(*shape, dtype=torch.float64, seed=0):
    return sample(*shape, dtype=dtype, seed=seed, requires_grad=True)


def additive(mask, dtype=torch.float64):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


# All are among the combinations below, under all options, and each preset stands alone in float32.
@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(spelling, marks=() if spelling in ("none", "bma") else pytest.mark.full)
        for spelling in SPELLINGS
        if "+" not in spelling
    ],
)
def test_every_gate_is_the_same_in_every_framework(gate):
    assert_agree(make(gate, num_kv_heads=2), inputs(2, T, 24))


@pytest.mark.parametrize("gate", ["none", *PRESETS])
def test_every_preset_is_the_same_in_every_framework_in_float32(gate):
    assert_agree(make(gate, num_kv_heads=2, dtype=torch.float32), inputs(2, T, 24, dtype=torch.float32))


@over(gate=axis(COMBINED, "g1+g2+g3+g4+g5"), dtype=DTYPE)
def test_all_gates_under_all_options_are_the_same_in_every_framework(gate, dtype):
    assert_agree(make(gate, **OPTIONS["everything"], dtype=dtype), inputs(2, T, 24, dtype=dtype))


@pytest.mark.parametrize("gate", side_by_side(CONTROLS))
@pytest.mark.parametrize("options", ["everything", "multi-query"])
def test_placebos_are_the_same_in_every_framework(gate, options):
    assert_agree(make(gate, **OPTIONS[options]), inputs(3, T, 24))


@pytest.mark.parametrize("gate", COMBINED[-3:])
def test_shared_gates_with_a_single_key_and_value_head_are_the_same_in_every_framework(gate):
    assert_agree(make(gate, **OPTIONS["multi-query"]), inputs(2, T, 24))


@over(options=axis({name: OPTIONS[name] for name in ("multi-query", "plain", "band")}), dtype=DTYPE)
def test_every_option_is_the_same_in_every_framework(options, dtype):
    assert_agree(make("g1+bma", **options, dtype=dtype), inputs(2, T, 24, dtype=dtype))


def test_the_combinations_hold_every_gate():
    combined = {gate for spelling in COMBINED for gate in Gates.parse(spelling)}
    assert combined == {gate for spelling in SPELLINGS for gate in Gates.parse(spelling)}
    assert combined >= {*GATES, *PRESETS.values()}


@over(length=axis([63, 1]), dtype=DTYPE)
def test_odd_lengths_are_the_same_in_every_framework(length, dtype):
    assert_agree(make("g1+bma", **OPTIONS["everything"], dtype=dtype), inputs(1, length, 24, dtype=dtype))


@over(shape=axis([(T, T), (2, 4, T, T)], (2, 4, T, T)), kind=axis(["bool", "additive"], "additive"), dtype=DTYPE)
def test_a_mask_is_the_same_in_every_framework(shape, kind, dtype):
    """Some rows may see nothing, by themselves or with what causality and the window leave."""
    mask = sample(*shape, seed=3) > 0.5
    layer = make("g1+bma", **OPTIONS["everything"], dtype=dtype)
    given = mask if kind == "bool" else additive(mask, dtype)
    assert_agree(layer, inputs(2, T, 24, dtype=dtype), mask=given, reference={"mask": mask})


@over(options=axis({"causal": OPTIONS["plain"], "bidirectional": OPTIONS["multi-query"]}), dtype=DTYPE)
def test_scores_are_shifted_alike(options, dtype):
    """An additive mask of any numbers, minus infinity and the most negative number among them."""
    layer, x = make("g1+bma", **options, dtype=dtype), inputs(2, T, 24, dtype=dtype)
    mask = 3 * sample(2, 4, T, T, seed=6, dtype=dtype)
    mask[0, :, :, 0] = torch.finfo(dtype).min
    mask[1, 1, 2] = float("-inf")
    assert_same(by_jax(layer, x, {"mask": mask}), by_torch(layer, layer, x, {"mask": mask}), dtype)


@over(
    positions=axis(
        {"rows": [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]], "one row": [[4, 0, 7, 7, 1]], "no rows": [4, 0, 7, 7, 1]}
    ),
    dtype=DTYPE,
)
def test_positions_are_the_same_in_every_framework(positions, dtype):
    layer = make("g3+bma-query", **GROUPED, dtype=dtype)
    assert_agree(layer, inputs(2, T, 24, dtype=dtype), positions=torch.tensor(positions))


@over(options=axis({"causal": OPTIONS["everything"], "bidirectional": OPTIONS["multi-query"]}), dtype=DTYPE)
def test_segment_ids_are_documents(options, dtype):
    layer, x = make("g1+bma+g3", **options, dtype=dtype), inputs(2, T, 24, dtype=dtype)
    ids = torch.tensor([[5, 5, 2, 2, 2], [0, 1, 1, 1, 0]])
    mask = sample(2, 1, T, T, seed=4) > -0.3
    together = (ids[:, :, None] == ids[:, None, :])[:, None]
    assert_agree(layer, x, documents=ids, mask=mask, reference={"mask": together & mask})


ACROSS = [
    "g1+g2+g3+g4+g5",
    "output:query+value:value+key:value+query:query+dense:output",
    "g1-head+value:input:head+key:input:head+query:input:head",
    "output:query:head+value:value:head+key:value:head+query:query:head",
    "off-by-one+output:output",
    "sink+output:output:head",
    "output:nothing+value:nothing+key:nothing+query:nothing+dense:nothing",
    "output:nothing:head+value:nothing:head+key:nothing:head+query:nothing:head",
]


def test_the_gates_that_cross_are_all_there():
    crossing = {gate for gate in GATES if not gate.needs_self_attention}
    assert {gate for spelling in ACROSS for gate in Gates.parse(spelling)} == crossing | {PRESETS["sink"]}


@pytest.mark.parametrize("gate", ["none", *ACROSS])
def test_cross_attention_is_the_same_in_every_framework(gate):
    layer = make(gate, causal=False, bias=True, **GROUPED)
    given = {"mask": sample(2, 1, 3, 7, seed=2) > 1, "positions": torch.tensor([5, 2, 9])}
    assert_agree(layer, inputs(2, 3, 24), context=inputs(2, 7, 24, seed=1), **given)


@pytest.mark.parametrize("gate", ACROSS[:2])
def test_cross_attention_is_the_same_in_every_framework_in_float32(gate):
    layer, dtype = make(gate, causal=False, bias=True, **GROUPED, dtype=torch.float32), torch.float32
    assert_agree(layer, inputs(2, 3, 24, dtype=dtype), context=inputs(2, 7, 24, dtype=dtype, seed=1))


@every_combination
def test_both_layers_are_the_same_plain_arrays(gate):
    layer = make(gate, **OPTIONS["everything"])
    own = twin(layer)
    arrays, expected = attention_arrays(own.params, own.config, causal=own.is_causal), layer.arrays()
    assert list(arrays.parameters()) == list(expected.parameters())
    for name, array in arrays.parameters().items():
        assert np.array_equal(array, expected.parameters()[name].detach().numpy())
    for name in ("gates", "rotary", "norm_epsilon", "temperature", "causal", "window", "shape"):
        assert getattr(arrays, name) == getattr(expected, name)


def in_chunks_of_torch(layer, x, sizes):
    cache = KVCache()
    with torch.no_grad():
        return torch.cat([layer(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)


def in_chunks(layer, x, sizes, *, max_length):
    """One compiled step for each size, the cache's length traced."""
    step = quick_jit(lambda part, cache: layer(part, cache=cache))
    cache, start, outputs = layer.cache(x.shape[0], max_length), 0, []
    for size in sizes:
        y, cache = step(x[:, start : start + size], cache)
        outputs.append(y)
        start += size
    assert int(cache.length) == start
    return np.concatenate(outputs, axis=1)


def assert_decode_agrees(layer, dtype, sizes):
    x = sample(2, sum(sizes), 24, dtype=dtype)
    with torch.no_grad():
        full = layer(x)
    own = in_chunks(twin(layer), x.numpy(), sizes, max_length=sum(sizes) + 2)
    assert_close(own, full, what=WHAT[dtype])
    assert_close(own, in_chunks_of_torch(layer, x, sizes), what=WHAT[dtype])


def some(*gates, full):
    """Run over gates; with `--full`, over those that are named so too."""
    return pytest.mark.parametrize("gate", [*gates, *(pytest.param(gate, marks=pytest.mark.full) for gate in full)])


@some("none", *side_by_side(PRESETS), full=PRESETS)
def test_token_by_token_is_the_whole_at_once(gate):
    assert_decode_agrees(make(gate, **OPTIONS["everything"]), torch.float64, [1] * 6)


@some(COMBINED[1], COMBINED[3], COMBINED[-1], full=[COMBINED[5], COMBINED[-2]])
def test_chunks_are_the_whole_at_once(gate):
    assert_decode_agrees(make(gate, **GROUPED, dtype=torch.float32), torch.float32, [3, 1, 1, 3])


@every_dtype
def test_without_causality_a_chunk_sees_itself_and_what_went_by(dtype):
    layer, x = make("g1+bma", rope=True, causal=False, window=4, dtype=dtype), sample(2, 6, 24, dtype=dtype)
    own = in_chunks(twin(layer), x.numpy(), [3, 1, 2], max_length=8)
    assert_close(own, in_chunks_of_torch(layer, x, [3, 1, 2]), what=WHAT[dtype])


@every_dtype
def test_gradients_pass_through_the_cache(dtype):
    layer, x = make("g1+g2+g3+g4+g5", **GROUPED, dtype=dtype), inputs(2, T, 24, dtype=dtype)
    own, weights = twin(layer), sample(2, T, 24, seed=99, dtype=dtype).numpy()

    def forward(inputs, params):
        cache, outputs = own.cache(2, 7), []
        for part in jnp.split(inputs[0], (3,), axis=1):
            y, cache = own.under(params)(part, cache=cache)
            outputs.append(y)
        y = jnp.concatenate(outputs, axis=1)
        return (y * weights).sum(), y

    differentiated = quick_jit(jax.value_and_grad(forward, argnums=(0, 1), has_aux=True))
    (_, y), found = differentiated([x.detach().numpy()], own.params)
    assert_same((y, *found), by_torch(layer, layer, x, {}), dtype)
