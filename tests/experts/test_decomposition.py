from dataclasses import replace

import jax_layers
import numpy as np
import pytest
import torch
import torch_layers
from closeness import naming
from covers import axis, rows
from errors import rejects
from layers import EXOTIC, GATES, TOGETHER, make_layer

from tidegate.experts.decomposition import decompose, with_input_gates
from tidegate.flax import attention_arrays

SPELLINGS = ("none", *map(str, GATES), *EXOTIC, *(spelling for spelling in TOGETHER if "+" in spelling))

rng = np.random.default_rng(0)
X = rng.standard_normal((2, 5, 6))
MASK = rng.random((2, 1, 5, 5)) < 0.6
MASK[0, 0, 2] = False
TOLERANCE = 1e-10
AXES = {
    "full": axis([True, False]),
    "G": axis([2, 4, 1]),
    "causal": axis([True, False]),
    "mask": axis({"masked": MASK, "all": None}),
}


def relative_error(layer, *, form, mask=None):
    output = layer(X, mask=mask)
    return decompose(layer, X, form=form, mask=mask).max_error(output) / (1 + np.abs(output).max())


@pytest.mark.parametrize("gate", SPELLINGS)
def test_the_mixture_is_the_layer(gate, request):
    for row in rows(AXES, full=request.config.getoption("--full")):
        options = {name: AXES[name].values[value] for name, value in row.items()}
        if "w5" in gate and options["G"] == 4:
            continue
        mask, layer = options.pop("mask"), make_layer(gate, **options)
        for form in ("signed", "convex"):
            with naming((row, form)):
                assert relative_error(layer, form=form, mask=mask) < TOLERANCE


def test_convex_weights_are_probabilities():
    parts = decompose(make_layer("bma"), X, form="convex")
    assert parts.head_weights.min() >= 0
    assert parts.channel_weights.min() >= 0
    np.testing.assert_allclose(parts.head_weights.sum(axis=0), 1, atol=1e-14)
    np.testing.assert_allclose(parts.channel_weights.sum(axis=1), 1, atol=1e-14)


def test_signed_weights_are_equal_heads_and_the_output_projection():
    layer = make_layer("g1")
    parts = decompose(layer, X)
    np.testing.assert_array_equal(parts.head_weights, np.full((4, 1), 1 / 4))
    np.testing.assert_allclose(parts.head_weights[:, None] * parts.channel_weights, layer.W_O, atol=1e-15)
    np.testing.assert_allclose(parts.token_weights.sum(axis=-1), 1, atol=1e-14)


@pytest.mark.parametrize("gate", ["sink", "off-by-one+g1"])
def test_a_sink_is_one_more_expert_and_the_weights_sum_to_one(gate):
    parts = decompose(make_layer(gate), X, mask=MASK)
    np.testing.assert_allclose(parts.token_weights.sum(axis=-1) + parts.sink_weights, 1, atol=1e-14)
    assert (parts.sink_weights[0, :, 2] == 1).all()
    assert parts.expert_kind == ("gated" if "g1" in gate else "linear")
    assert decompose(make_layer("g1"), X).sink_weights is None


def test_a_feature_that_no_channel_reaches_has_equal_convex_weights():
    layer = make_layer("none")
    W_O = layer.W_O.copy()
    W_O[:, :, 0], W_O[1, :, 1] = 0, 0
    layer = replace(layer, W_O=W_O)
    parts = decompose(layer, X, form="convex")
    np.testing.assert_array_equal(parts.head_weights[:, 0], 1 / 4)
    np.testing.assert_array_equal(parts.channel_weights[1, :, :2], 1 / 4)
    assert parts.max_error(layer(X)) < TOLERANCE


@pytest.mark.parametrize(
    ("gate", "source", "destination"),
    [("g1", False, True), ("bma", True, False), ("none", False, False), ("g3", False, False), ("g5", False, False)],
)
def test_a_gate_between_value_and_output_is_part_of_the_experts(gate, source, destination):
    parts = decompose(make_layer(gate), X)
    assert parts.expert_kind == ("gated" if source or destination else "linear")
    for found, wanted in ((parts.source_gate, source), (parts.destination_gate, destination)):
        assert (None if found is None else found.shape) == ((2, 4, 5, 4) if wanted else None)


def test_the_weighted_experts_are_the_head_outputs():
    layer = make_layer("g1+g2")
    parts = decompose(layer, X)
    heads = np.einsum("bhts,bhtsc->bhtc", parts.token_weights, parts.experts())
    np.testing.assert_allclose(heads, layer.trace(X).heads, atol=1e-13)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("gate", "reading_input"), [("bma-query", "output"), ("bma", "value")])
def test_a_gate_that_reads_the_query_is_one_that_reads_the_input(gate, reading_input, full):
    layer = make_layer(gate, full=full)
    rewritten = with_input_gates(layer)
    (new,) = rewritten.gates
    assert (new.site, new.reads) == (reading_input, "input")
    np.testing.assert_allclose(rewritten(X), layer(X), atol=1e-12)
    theirs = rewritten.gate_parameters[new.site]["weight"]
    queries = layer.W_Q if gate == "bma-query" else layer.W_Q.reshape(2, 2, 6, 4).transpose(0, 2, 1, 3).reshape(2, 6, 8)
    np.testing.assert_allclose(theirs, queries @ layer.gate_parameters[new.site]["weight"], atol=1e-13)


def test_a_low_rank_query_gate_is_not_rewritten():
    with rejects("layer", hint="rank and width"):
        with_input_gates(make_layer("value:query:r3:w5"))


def test_layers_of_pytorch_and_jax_decompose_alike():
    layer = torch_layers.make("bma", num_kv_heads=2, rope=True, bias=True)
    x = torch_layers.sample(2, 5, 24)
    parts = decompose(layer, x)
    twin = jax_layers.twin(layer)
    theirs = decompose(attention_arrays(twin.params, twin.config), x.numpy())
    assert parts.max_error(layer(x)) < TOLERANCE
    assert theirs.max_error(parts.reconstruct()) < TOLERANCE


def test_cross_attention_decomposes():
    layer = make_layer("g1", causal=False)
    context = np.random.default_rng(1).standard_normal((2, 7, 6))
    assert decompose(layer, X, context=context).max_error(layer(X, context=context)) < TOLERANCE


def test_an_object_that_is_not_a_layer_is_rejected():
    with pytest.raises(TypeError, match="AttentionArrays"):
        decompose(torch.nn.Linear(2, 2), X)
    with rejects("form"):
        decompose(make_layer(), X, form="other")
