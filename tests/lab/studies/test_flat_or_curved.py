from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_close

from tidegate.geometry import gaussian_curvature
from tidegate.lab.studies.flat_or_curved import view
from tidegate.lab.studies.flat_or_curved.run import (
    CHARTS,
    FlatOrCurvedOptions,
    finding,
    random_layer,
    run_flat_or_curved,
)
from tidegate.lab.studies.flat_or_curved.spherical_cap import (
    cap_chart,
    cap_layer,
    head_grain_chart,
    measure_cap,
    patch_points,
    three_features,
    ungated_chart,
)
from tidegate.tensors.gating import gate_logits, gate_reads

SMALL = FlatOrCurvedOptions(
    gates=("none", "bma", "output:output", "output:output:head"),
    strengths=(1.0,),
    num_layers=2,
    num_planes=4,
    d_model=8,
    length=6,
    cap_widths=(24,),
)


@pytest.fixture(scope="module")
def result():
    return run_flat_or_curved(SMALL)


def cells(result, **wanted):
    return [cell for cell in result.cells if all(getattr(cell, name) == value for name, value in wanted.items())]


def test_every_gate_has_every_chart_once_a_strength(result):
    for gate in SMALL.gates:
        assert [cell.chart for cell in cells(result, gate=gate, tangent="plane")] == list(CHARTS)
    assert {cell.count for cell in cells(result, tangent="plane")} == {8}


@pytest.mark.parametrize("tangent", ["full", "plane"])
def test_only_the_gate_of_one_number_a_feature_that_reads_the_output_bends_the_weight_chart(result, tangent):
    bent = {cell.gate for cell in cells(result, chart="weight", tangent=tangent) if not cell.flat}
    assert bent == {"output:output"}


def test_slices_of_the_query_chart_bend_without_a_gate(result):
    (cell,) = cells(result, gate="none", chart="query")
    assert not cell.flat


def test_the_finding_names_what_is_flat(result):
    assert "The weight chart is flat to rounding error with none, bma, output:output:head and" in finding(result)


def test_without_an_ungated_layer_the_study_has_a_page_and_nothing_to_compare_with():
    result = run_flat_or_curved(replace(SMALL, gates=("g1",), num_layers=1, num_planes=2, cap_widths=(8,)))
    assert view(result)[0].panels[0].row_label == "gate: g1"
    assert "without a gate is" not in finding(result)


def test_one_number_a_head_makes_a_cylinder():
    # Outputs of equal logit lie on parallel lines before the gate and after it: steps along them keep their direction.
    chart = head_grain_chart()
    gate = 2 * np.random.default_rng(0).standard_normal(32)
    values = np.random.default_rng(1).standard_normal((3, 32))
    logits = (values[:2] - values[2]) @ gate
    along = torch.from_numpy(0.02 * np.array([logits[1], -logits[0]]) / np.linalg.norm(logits))
    across = torch.from_numpy(0.02 * logits / np.linalg.norm(logits))
    centre = torch.full((2,), 1 / 3, dtype=torch.float64)
    steps = [chart(centre + shift * across + along) - chart(centre + shift * across) for shift in (-3, 0, 3)]
    directions = torch.stack([step / step.norm() for step in steps])
    assert_close(directions[1:], directions[:1].expand(2, -1))


@pytest.mark.parametrize("gate", ["bma", "g1", "g5", "vga", "output:output:head"])
def test_strength_is_the_deviation_of_the_logits(gate):
    layer, x = random_layer(gate, 0.7, SMALL, 0)
    (one,) = layer.gates
    heads = 1 if one.site == "dense" else layer.shape.num_heads
    reads = gate_reads(one, layer.trace(x).sources)
    logits = gate_logits(one, reads, layer.gate_parameters[one.path], num_heads=heads)
    assert_close(logits.std(), torch.tensor(0.7, dtype=torch.float64))


def test_the_cap_by_hand_is_the_formula():
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    assert_close(cap_chart(three_features())(weights[:2]), weights * torch.sigmoid(1 - weights))


def test_the_middle_of_the_cap_by_hand_bends_by_the_second_derivative_of_the_gate():
    middle = torch.full((2,), 1 / 3, dtype=torch.float64)
    w = torch.tensor(1 / 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(w * torch.sigmoid(1 - w), w, create_graph=True)
    (second,) = torch.autograd.grad(first, w)
    found = gaussian_curvature(cap_chart(three_features()), middle)
    assert_close(found, (second**2 / (3 * first**4)).detach(), what="gradient")


def test_more_features_come_nearer_to_the_sphere():
    caps = [measure_cap("", cap_chart(cap_layer(width)), width, num_points=100) for width in (8, 16, 32)]
    distances = [cap.distance for cap in caps]
    assert distances == sorted(distances, reverse=True)
    assert 0.99 < caps[-1].low < caps[-1].high < 1.01
    assert_close(caps[-1].radius, np.float64(1), dtype="float32", what="gradient")


@pytest.mark.parametrize("chart", [head_grain_chart(), ungated_chart()], ids=["one number a head", "no gate"])
def test_without_one_number_a_feature_the_patch_is_developable(chart):
    points = torch.from_numpy(patch_points(50)[:, :2])
    assert_close(gaussian_curvature(chart, points), torch.zeros(50, dtype=torch.float64))
