"""One suite of laws over every gate: a new gate is a new row of `GATES`, not a new file."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from closeness import assert_close, to_numpy
from covers import GATE, LIBRARY
from layers import EXOTIC, GATES, WITH_MATRICES, make_layer
from libraries import JAX, JAX_JIT, NUMPY, TORCH

from tidegate import PRESETS, Gate
from tidegate.tensors.gating import gate_reads, gate_values
from tidegate.tensors.rotary import Rotary

T = 5
X = np.random.default_rng(1).standard_normal((2, T, 6))

# Every gate on NumPy and PyTorch; a few also on JAX, where each costs a compilation, and eagerly one for each step.
CASES = [
    *((gate, library) for gate in GATES for library in (NUMPY, TORCH)),
    (PRESETS["bma"], JAX),
    *((PRESETS[name], JAX_JIT) for name in ("bma-query", "g1", "g3", "g5")),
]
over_gates = pytest.mark.parametrize("gate", GATES, ids=str)
over_gates_with_matrices = pytest.mark.parametrize("gate", WITH_MATRICES, ids=str)
over_everything = pytest.mark.parametrize("gate", [*GATES, *map(Gate.parse, EXOTIC)], ids=str)
over_libraries = pytest.mark.parametrize(
    ("gate", "library"), CASES, ids=[f"{gate}-{library.name}" for gate, library in CASES]
)


def test_the_cases_touch_every_gate_and_every_library():
    assert {str(gate) for gate, _ in CASES} == set(GATE.values)
    assert {library.name for _, library in CASES} == set(LIBRARY.values)


def outputs_and_weights(library, layer, *inputs):
    """Of each input in turn: the outputs and the weights."""

    def run(*inputs):
        return [(trace.output, trace.weights) for trace in map(layer.trace, inputs)]

    return [to_numpy(array) for pair in library.call(run, *inputs) for array in pair]


@cache
def with_rotary(gate, library):
    return outputs_and_weights(library, make_layer(gate, rotary=Rotary()), X)


@over_libraries
def test_a_gate_leaves_the_weights_alone_unless_it_is_on_the_query_or_key(gate, library):
    plain, gated = with_rotary(None, library), with_rotary(gate, library)
    assert abs(plain[0] - gated[0]).max() > 1e-3
    if gate.site in ("query", "key"):
        assert abs(plain[1] - gated[1]).max() > 1e-3
    else:
        assert (plain[1] == gated[1]).all()


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.site in ("query", "key")], ids=str)
def test_a_norm_undoes_a_positive_number_per_head(gate):
    """A norm forgets a vector's length, which is all that a gate of head grain on the query or key changes."""
    norms = {"q_norm": np.ones(4), "k_norm": np.ones(4), "norm_epsilon": 1e-30}
    plain, gated = make_layer(**norms)(X), make_layer(gate, **norms)(X)
    if gate.grain == "head":
        assert_close(gated, plain)
    else:
        assert abs(gated - plain).max() > 1e-3


@over_gates_with_matrices
@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_a_centred_gate_with_zero_weights_is_no_gate(gate, activation):
    """Bit by bit, as its activation is exactly 1 at zero."""
    plain = make_layer(full=True)
    gated = make_layer(replace(gate, activation=activation, init_std=0, bias=0.0), full=True)
    assert (gated(X) == plain(X)).all()


@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_a_centred_gate_with_zero_weights_is_no_gate_on_any_library(library, activation):
    plain = make_layer()
    gated = make_layer([Gate(site=site, activation=activation, init_std=0) for site in ("value", "output", "dense")])
    # Compiled as a whole, a product is fused and rounded once less: equal to rounding, not bit by bit.
    compare = assert_close if library.jitted else np.testing.assert_array_equal
    compare(to_numpy(library.call(gated, X)), to_numpy(library.call(plain, X)))


@over_everything
def test_an_output_does_not_depend_on_later_inputs(gate):
    layer = make_layer(gate, full=True)
    output = layer(X)
    for t in range(T - 1):
        later = X.copy()
        later[:, t + 1 :] = np.random.default_rng(2).standard_normal((2, T - t - 1, 6))
        moved = layer(later)
        assert_close(moved[:, : t + 1], output[:, : t + 1])
        assert abs(moved[:, t + 1 :] - output[:, t + 1 :]).max() > 1e-3


@over_libraries
def test_without_positions_and_masks_a_permutation_of_the_input_permutes_the_output(gate, library):
    layer = make_layer(gate, full=True, rotary=None, causal=False)
    order = np.random.default_rng(3).permutation(T)
    # Side by side, as each call of a new function costs a compilation.
    output, weights, moved, moved_weights = outputs_and_weights(library, layer, X, X[:, order])
    assert_close(moved, output[:, order])
    assert_close(moved_weights, weights[:, :, order][..., order])


@over_everything
def test_rows_of_a_batch_do_not_see_each_other(gate):
    layer = make_layer(gate, full=True)
    whole = layer(X)
    for b in range(2):
        assert_close(layer(X[b]), whole[b])


CLOSABLE = [gate for gate in GATES if gate.site in ("value", "output", "dense")]


@pytest.mark.parametrize("gate", CLOSABLE, ids=str)
def test_a_closed_gate_lets_nothing_through(gate):
    """A bias far below every logit closes a sigmoid exactly: it is 0 in floating point."""
    assert (make_layer(replace(gate, bias=-1e4))(X) == 0).all()


@pytest.mark.parametrize("site", ["value", "output", "dense"])
def test_a_closed_gate_lets_nothing_through_on_any_library(library, site):
    assert (to_numpy(library.call(make_layer(Gate(site=site, bias=-1e4)), X)) == 0).all()


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.site == "output"], ids=str)
def test_a_gate_of_the_output_shortens_a_head_to_its_largest_factor_or_less(gate):
    layer = make_layer(gate)
    trace, plain = layer.trace(X), make_layer().trace(X).heads
    reads = gate_reads(gate, replace(trace.sources, output=plain) if gate.reads == "output" else trace.sources)
    factors = gate_values(gate, reads, layer.gate_parameters[gate.path], num_heads=4)
    assert_close(trace.heads, factors * plain)
    lengths, bounds = np.linalg.norm(trace.heads, axis=-1), factors.max(axis=-1) * np.linalg.norm(plain, axis=-1)
    assert (lengths <= bounds * (1 + 1e-12)).all()
    assert (bounds < np.linalg.norm(plain, axis=-1)).all()


@over_gates
def test_an_open_gate_is_no_gate(gate):
    """A bias far above every logit opens a sigmoid exactly."""
    assert (make_layer(replace(gate, bias=1e4), full=True)(X) == make_layer(full=True)(X)).all()


@over_gates
def test_a_single_position_has_weight_one_and_a_closed_form(gate):
    """One key: the output is the value through W_O, gated once; what happens to query and key cannot matter."""
    layer, x = make_layer(gate), X[:, :1]
    output, weights = outputs_and_weights(NUMPY, layer, x)
    assert (weights == 1).all()
    plain = make_layer()(x)
    if gate.site in ("query", "key"):
        assert_close(output, plain)
        return
    trace = layer.trace(x)
    heads = trace.sources.value.repeat(2, axis=1)
    g = dict.fromkeys(("partition", "output"), lambda: trace.heads / heads)
    g["value"] = lambda: trace.value / trace.sources.value
    if gate.site == "dense":
        assert ((output / plain > 0) & (output / plain < 1)).all()
    else:
        values = g[gate.path]()
        assert ((values > 0) & (values < 1)).all()
        assert_close(output, np.einsum("bhtk,hkd->btd", heads * values.repeat(4 // values.shape[1], axis=1), layer.W_O))


def test_the_two_readings_agree_for_one_position_and_differ_for_more(library):
    """With one key/value head for each head, the same matrices serve `bma` and `bma-query`."""
    source, query = make_layer("bma", G=4), make_layer("bma-query", G=4)
    query = query.with_parameters({"gate.output.weight": source.gate_parameters["value"]["weight"]})
    assert_close(library.call(source, X[:, :1]), library.call(query, X[:, :1]))
    assert abs(to_numpy(library.call(source, X)) - to_numpy(library.call(query, X))).max() > 1e-2


@over_gates
def test_a_gate_reads_before_rotation_and_norms(gate):
    """Positions and norms move queries and keys; at the value, output and dense site they move the weights alone."""
    if gate.site in ("query", "key") or gate.reads in ("output", "partition"):
        layer = make_layer(gate, full=True)
        raw, bare = layer.trace(X).sources, make_layer(full=True).trace(X).sources
        assert (raw.query == bare.query).all()
        assert (raw.value == bare.value).all()
        return
    plain, located = make_layer(gate), make_layer(gate, full=True, b_Q=None, b_K=None, b_V=None, b_O=None)
    x = X[:, :1]
    assert_close(located(x), plain(x))
