"""A sink is a gate: laws of one more state in the softmax, which has weight and no value."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from layers import make_layer

from tidegate.tensors.attention import attention_scores, attention_weights, scaled_dot_product_attention
from tidegate.tensors.layer_gradients import layer_backward
from tidegate.tensors.sink import entropy_with_sink, log_partition_with_sink, sink_attention, sink_backward, sink_mass
from tidegate.tensors.softmax import entropy, log_partition

B, H, T, S, h = 2, 3, 5, 7, 4


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


Q, K, V, SINK = sample(B, H, T, h), sample(B, H, S, h, seed=1), sample(B, H, S, h, seed=2), sample(H, seed=3)
MASK = sample(B, 1, T, S, seed=4) > 0
MASK[0, 0, 2] = False
logits = st.floats(-30, 30)


def test_a_sink_multiplies_the_output_by_a_sigmoid_of_the_log_partition(library):
    def both(Q, K, V, sink, mask):
        mass = sink_mass(log_partition(attention_scores(Q, K), mask=mask), sink)
        return sink_attention(Q, K, V, sink, mask), (1 - mass)[..., None] * scaled_dot_product_attention(Q, K, V, mask)

    assert_close(*library.call(both, Q, K, V, SINK, MASK))


def test_without_heads_a_sink_is_one_number(library):
    found = library.call(sink_attention, Q[0, 1], K[0, 1], V[0, 1], SINK[1])
    assert_close(found, sink_attention(Q, K, V, SINK)[0, 1])


def test_a_sink_far_below_all_scores_is_none_and_one_far_above_takes_everything(library):
    plain = scaled_dot_product_attention(Q, K, V, MASK)
    assert_close(library.call(sink_attention, Q, K, V, np.full(H, -1e4), MASK), plain)
    assert (to_numpy(library.call(sink_attention, Q, K, V, np.full(H, 1e4), MASK)) == 0).all()


def test_a_query_that_sees_nothing_has_all_its_weight_on_the_sink(library):
    partition = log_partition(attention_scores(Q, K), mask=MASK)
    assert (partition[0, :, 2] == -math.inf).all()
    assert (to_numpy(library.call(sink_mass, partition, SINK))[0, :, 2] == 1).all()
    assert (to_numpy(library.call(log_partition_with_sink, partition, SINK))[0, :, 2] == SINK).all()
    assert (to_numpy(library.call(sink_attention, Q, K, V, SINK, MASK))[0, :, 2] == 0).all()


@given(scores=st.lists(logits, min_size=1, max_size=4), sink=logits)
def test_the_sink_is_one_more_state_of_the_softmax(scores, sink):
    states = np.array([*scores, sink])
    partition, weights = log_partition(np.array(scores)), attention_weights(states[None])[0]
    mass = sink_mass(partition[None], np.array(sink))[0]
    assert_close(mass, weights[-1])
    assert_close(log_partition_with_sink(partition[None], np.array(sink))[0], log_partition(states))
    keys = entropy(attention_weights(np.array(scores)[None])[0])
    assert_close(entropy_with_sink(keys, mass), entropy(weights, 1e-300))


def test_an_entropy_with_all_or_nothing_on_the_sink_is_finite(library):
    found = library.call(entropy_with_sink, np.array([0.5, 0.5]), np.array([0.0, 1.0]))
    assert_close(found, np.array([0.5, 0.0]))


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_the_plain_backward_pass_with_the_sinks_weights_has_pytorchs_gradients(mask):
    given = [torch.from_numpy(array).requires_grad_() for array in (Q, K, V, SINK)]
    E = sample(B, H, T, h, seed=5)
    sink_attention(*given, None if mask is None else torch.from_numpy(mask)).backward(torch.from_numpy(E))
    found = sink_backward(E, Q, K, V, SINK, mask=mask)
    for name, leaf in zip(("Q", "K", "V", "sink"), given, strict=True):
        assert_close(found[f"dL_d{name}"], leaf.grad, what="gradient")


def test_the_plain_backward_pass_with_the_sinks_weights_has_jaxs_gradients():
    E = sample(B, H, T, h, seed=5)

    @jax.jit
    def both(*arrays):
        _, back = jax.vjp(lambda *arrays: sink_attention(*arrays, MASK), *arrays)
        return sink_backward(E, *arrays, mask=MASK), back(jnp.asarray(E))

    found, judge = both(Q, K, V, SINK)
    for name, gradient in zip(("Q", "K", "V", "sink"), judge, strict=True):
        assert_close(found[f"dL_d{name}"], gradient, what="gradient")


def test_gradients_of_a_shared_sink_and_shared_keys_are_summed():
    E = sample(B, H, T, h, seed=5)
    found = sink_backward(E, Q, K[:1, :1], V[:1, :1], np.array(0.3))
    every = sink_backward(E, Q, *(np.broadcast_to(x[:1, :1], K.shape).copy() for x in (K, V)), np.full(H, 0.3))
    assert_close(found["dL_dK"], every["dL_dK"].sum((0, 1), keepdims=True), what="gradient")
    assert_close(found["dL_dsink"], every["dL_dsink"].sum(), what="gradient")


def test_a_layer_derives_the_sinks_gradient_along_the_other_path():
    """Through the gate and the log-partition, beside the one backward pass with the weights that include the sink."""
    layer = make_layer("sink", d=h, H=H, G=H, causal=False)
    layer = layer.with_parameters({"gate.partition.bias": -SINK[:, None]})
    E = sample(B, T, h, seed=6)
    found, trace = layer_backward(layer, sample(B, T, h), E), layer.trace(sample(B, T, h))
    by_hand = sink_backward(np.einsum("btd,hkd->bhtk", E, layer.W_O), trace.query, trace.key, trace.value, SINK)
    assert_close(found["gate.partition.bias"][:, 0], -by_hand["dL_dsink"], what="gradient")
    for name in "QKV":
        slope = np.einsum("btd,bhtk->hdk", sample(B, T, h), by_hand[f"dL_d{name}"])
        assert_close(found[f"W_{name}"], slope, what="gradient")
