import jax
import numpy as np
import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from layers import EXOTIC, GATES, TOGETHER, make_layer

from tidegate import Gates
from tidegate.geometry import (
    depth_chart,
    frozen_weight_chart,
    gaussian_curvature,
    input_chart,
    query_chart,
    sectional_curvature,
    weight_chart,
)

# Six positions see enough keys (more than a head is wide) for a query to move the output in every direction. The heads
# together are wider than the model, so that a gated value has a positive codimension.
POSITIONS, D, HEADS, WIDTH = 6, 6, 2, 4

SPELLINGS = ("none", *map(str, GATES))
every_gate = pytest.mark.parametrize("gate", SPELLINGS)
X = torch.from_numpy(np.random.default_rng(1).standard_normal((POSITIONS, D)))


def layer(gate, *, d=D, seed=0, G=HEADS, **options):
    """Weights of unit gain and gates of moderate slope, neither saturated nor nearly linear."""
    made = make_layer(gate, seed=seed, d=d, H=HEADS, G=G, h=WIDTH, scale=25.0, **options)
    weights = {name: array for name, array in made.parameters().items() if name.startswith("W_")}
    return made.with_parameters({name: array / np.sqrt(array.shape[-2]) for name, array in weights.items()})


CHARTS = {
    "weight": lambda made, x: weight_chart(made, x, position=2),
    "frozen": lambda made, x: frozen_weight_chart(made, x, moving=0),
    "query": query_chart,
    "input": lambda made, x: input_chart(made, x, moving=0),
    "depth": lambda made, x: depth_chart([made, made], x, moving=0),
}


def chart_of(name, gate, x=X):
    return CHARTS[name](layer(gate), x)


def curvatures(chart, tangent, *, count=6, seed=0):
    u, v = np.random.default_rng(seed).standard_normal((2, count, chart.dimension))
    return sectional_curvature(chart, chart.start, u, v, tangent=tangent).numpy()


MEASURES = (("query", "plane"), ("input", "full"), ("input", "plane"), ("depth", "full"))


def sites_and_reads(gate):
    (one,) = Gates.parse(gate)
    return one.site, one.reads


@pytest.mark.parametrize("gate", ["none", *TOGETHER, *EXOTIC])
def test_every_chart_starts_at_what_the_layer_computes(gate):
    made = layer(gate, full=True, G=1)
    output = made(X)
    for position in (2, -1):
        for chart in (weight_chart(made, X, position=position), query_chart(made, X, position=position)):
            assert_close(chart(chart.start), output[position])
    heads = made.trace(X).heads
    if made.gates.at("dense") is None:
        for chart in (weight_chart(made, X, head=1), query_chart(made, X, head=1)):
            assert_close(chart(chart.start), heads[1, -1])
    for chart in (frozen_weight_chart(made, X), input_chart(made, X), depth_chart([made], X, residual=False)):
        assert_close(chart(chart.start), output.reshape(-1))
    for chart in (frozen_weight_chart(made, X, moving=2), input_chart(made, X, moving=2)):
        assert_close(chart(chart.start), output[2:].reshape(-1))


def test_the_query_chart_moves_as_the_layer_does():
    # Only queries are projected from the input where W_K and W_V are 0 on the moving channel.
    made = layer("bma-query+g4")
    arrays = {name: made.parameters()[name].copy() for name in ("W_K", "W_V", "gate.query.weight")}
    for array in arrays.values():
        array[:, 0] = 0
    made = made.with_parameters(arrays)
    chart = query_chart(made, X)
    shift = torch.zeros_like(X)
    shift[-1, 0] = 0.7
    moved = chart.start + 0.7 * torch.from_numpy(made.W_Q[:, 0]).reshape(-1)
    assert_close(chart(moved), made(X + shift)[-1])


@every_gate
def test_the_weight_chart_bends_only_under_a_gate_that_reads_the_output(gate):
    chart = chart_of("weight", gate)
    assert chart.says_something
    bends = gate != "none" and sites_and_reads(gate)[1] == "output"
    for tangent in ("full", "plane"):
        found = np.abs(curvatures(chart, tangent))
        assert found.max() > 1e-5 if bends else found.max() == 0


@every_gate
def test_the_frozen_weight_chart_bends_under_value_output_and_dense_gates(gate):
    chart = chart_of("frozen", gate)
    assert chart.says_something
    site, reads = ("none", "nothing") if gate == "none" else sites_and_reads(gate)
    # The input of a sink and constants are fixed.
    bends = site in ("value", "output", "dense") and reads not in ("partition", "nothing")
    for tangent in ("full", "plane"):
        found = np.abs(curvatures(chart, tangent))
        assert found.max() > 1e-5 if bends else found.max() == 0


@pytest.mark.parametrize("gate", ["g2", "bma", "vga"])
def test_a_gated_value_needs_heads_wider_than_the_model_for_full_curvature(gate):
    # With d = H h the codimension is 0: slices can be curved, the manifold cannot.
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((POSITIONS, HEADS * WIDTH)))
    chart = frozen_weight_chart(layer(gate, d=HEADS * WIDTH), x, moving=0)
    assert np.abs(curvatures(chart, "plane")).max() > 1e-4
    assert np.abs(curvatures(chart, "full")).max() < 1e-20


@pytest.mark.parametrize("gate", ["none", "g1", "bma", "key:query:head"])
def test_a_heads_query_chart_is_flat_for_want_of_codimension_and_its_slices_bend(gate):
    chart = query_chart(layer(gate), X, head=0)
    assert (chart.dimension, chart.ambient_dimension, chart.says_something) == (WIDTH, WIDTH, False)
    assert np.abs(curvatures(chart, "full")).max() < 1e-20
    assert np.abs(curvatures(chart, "plane")).min() > 1e-5


@over(
    gate=axis(SPELLINGS, "none", "g1", "bma"),
    measure=axis({" ".join(pair): pair for pair in MEASURES}, "input full"),
)
def test_the_query_input_and_depth_charts_bend_with_and_without_a_gate(gate, measure):
    name, tangent = measure
    assert np.abs(curvatures(chart_of(name, gate), tangent)).max() > 1e-5


def test_slices_of_random_ungated_query_charts_are_mostly_negative_and_sometimes_positive():
    found = []
    for seed in range(12):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal((16, D)))
        found.append(curvatures(query_chart(layer("none", seed=seed), x, head=0), "plane", count=20, seed=seed))
    positive = np.mean(np.concatenate(found) > 0)
    assert 0.05 < positive < 0.45


def test_one_number_a_head_from_the_output_leaves_one_heads_weight_chart_flat():
    # The gate is constant along some directions, so that the image is a cylinder.
    made = layer("output:output:head")
    chart = weight_chart(made, X, position=3, head=0)
    assert chart.says_something
    assert np.abs(curvatures(chart, "full")).max() < 1e-13
    step = torch.from_numpy(np.random.default_rng(0).standard_normal(3))
    bend = [chart(chart.start + s * step) for s in (-0.1, 0.0, 0.1)]
    assert (bend[0] - 2 * bend[1] + bend[2]).abs().max() > 1e-5
    element = weight_chart(layer("output:output"), X, position=3, head=0)
    assert np.abs(curvatures(element, "full")).max() > 1e-4


def test_a_slice_has_the_curvature_of_its_plane():
    chart = chart_of("input", "g1")
    u, v = torch.from_numpy(np.random.default_rng(0).standard_normal((2, chart.dimension)))
    surface = chart.slice(u, v)
    assert (surface.dimension, surface.ambient_dimension) == (2, chart.ambient_dimension)
    expected = sectional_curvature(chart, chart.start, u, v, tangent="plane")
    assert_close(gaussian_curvature(surface, surface.start), expected, what="gradient")


@pytest.mark.parametrize("name", ["weight", "frozen", "query", "input"])
def test_jax_and_torch_measure_the_same_layer_alike(name):
    ours, theirs = (chart_of(name, "output:output+value:query", x) for x in (X, jax.device_put(X.numpy())))
    u, v = np.random.default_rng(2).standard_normal((2, 2, ours.dimension))
    one, other = (sectional_curvature(chart, chart.start, u, v, tangent="plane") for chart in (ours, theirs))
    assert_close(one, np.asarray(other), what="gradient")


def test_outputs_that_cannot_see_the_moving_position_are_left_out():
    made = layer("none", window=2)
    assert input_chart(made, X, moving=1).ambient_dimension == 2 * D
    assert frozen_weight_chart(made, X, moving=-1).codimension == 0
    assert depth_chart([made, made], X, moving=1).ambient_dimension == 3 * D
    assert depth_chart([made], X, moving=1, outputs=[0, 3]).ambient_dimension == 2 * D
    assert weight_chart(made, X).dimension == HEADS
    assert input_chart(layer("none", causal=False), X, moving=-1).ambient_dimension == POSITIONS * D


def test_a_stack_may_be_any_function():
    made = layer("g1")
    ours, theirs = depth_chart([made, made], X), depth_chart(lambda x: x + made(x) + made(x + made(x)), X)
    assert_close(ours(ours.start), theirs(theirs.start))


def test_bad_arguments_are_named():
    made = layer("g5")
    for chart in (weight_chart, query_chart):
        with rejects("head"):
            chart(made, X, head=0)
        with rejects("position"):
            chart(made, X, position=6)
        with rejects("head"):
            chart(layer("none"), X, head=2)
    for chart in (input_chart, frozen_weight_chart):
        with rejects("moving"):
            chart(made, X, moving=9)
        with rejects("x"):
            chart(made, X[None])
    with rejects("stack"):
        depth_chart([], X)
