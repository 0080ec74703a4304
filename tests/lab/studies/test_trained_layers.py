import math

import pytest
from closeness import assert_close

from tidegate.lab.studies.trained_layers import STUDY, TrainedLayersOptions, TrainedLayersResult, finding
from tidegate.lab.studies.trained_layers.run import Snapshot, magnitude, positive_share, ratio
from tidegate.lab.training.measurements import LayerCurvature, ModelCurvature, Sampling

OPTIONS = TrainedLayersOptions(gates=("none", "g1"), num_layers=2, num_seeds=3)


def snapshot(gate, seed, steps, magnitudes, positive=0.25):
    layers = tuple(
        LayerCurvature(layer=place, count=4, quantiles=(-2.0, -1.0, -0.5, 0.0, 1.0), magnitude=value, positive=positive)
        for place, value in enumerate(magnitudes)
    )
    curvature = ModelCurvature(model=gate, sampling=Sampling(), num_sequences=1, length=4, layers=layers)
    return Snapshot(gate=gate, seed=seed, steps=steps, loss=2.0, curvature=curvature)


def result_of(factors):
    """`none` bends by 0.01 and then by 1 and 4; `g1` by as much at the start, and then by a factor of each seed."""
    measured = []
    for seed, factor in enumerate(factors):
        for gate, end in (("none", (1.0, 4.0)), ("g1", (factor, 4 * factor))):
            measured += [snapshot(gate, seed, 0, (0.01, 0.01)), snapshot(gate, seed, OPTIONS.steps, end)]
    return TrainedLayersResult(options=OPTIONS, measured=tuple(measured))


def test_a_model_bends_by_the_geometric_mean_of_its_layers_unless_a_layer_is_named():
    plain = result_of((2.0, 2.0, 2.0)).of("none", trained=True)
    assert magnitude(plain).value == pytest.approx(2)
    assert [magnitude(plain, layer=layer).value for layer in (0, 1)] == pytest.approx([1, 4])
    assert positive_share(plain).value == pytest.approx(0.25)


def test_the_interval_of_a_ratio_is_that_of_its_logarithm_over_seeds():
    result = result_of((1.0, 2.0, 4.0))
    found = ratio(result.of("g1", trained=True), result.of("none", trained=True))
    # Student's t for two degrees of freedom at 95 % is 4.3027; the logarithms have the deviation log 2.
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert_close(math.log(found.value), math.log(2))
    assert math.log(found.high) == pytest.approx(math.log(2) + half, abs=1e-6)
    assert math.log(found.low) == pytest.approx(math.log(2) - half, abs=1e-6)
    assert not found.excludes(1)


@pytest.mark.parametrize(("factors", "words"), [((1.0, 2.0, 4.0), "none of them"), ((2.0, 2.1, 2.2), "g1")])
def test_the_finding_names_the_gates_that_are_told_apart_from_no_gate(factors, words):
    assert finding(result_of(factors)).endswith(f"intervals that exclude 1: {words}.")


def test_every_gate_is_trained_under_every_seed_from_the_seed_named():
    few = TrainedLayersOptions(
        gates=("none", "g1"),
        d_model=8,
        num_heads=2,
        num_layers=1,
        length=8,
        steps=1,
        batch_size=2,
        num_sequences=1,
        window=4,
        sampling=Sampling(num_positions=1, num_planes=1),
        seed=3,
        num_seeds=2,
    )
    result = STUDY.run(few)
    for gate in few.gates:
        start, end = (result.of(gate, trained=trained) for trained in (False, True))
        assert [each.seed for each in start] == [each.seed for each in end] == [3, 4]
        assert start[0].curvature != start[1].curvature
