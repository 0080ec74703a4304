from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_close

from tidegate.lab.studies.depth.run import (
    DepthCurve,
    DepthOptions,
    finding,
    fit_growth,
    run_depth,
    structured_stack,
)

SMALL = DepthOptions(gates=("none", "bma"), depths=(1, 2, 4), num_seeds=2, num_planes=3, d_model=6, length=3)


@pytest.fixture(scope="module")
def result():
    return run_depth(SMALL)


@pytest.mark.parametrize("exponent", [-1.0, 0.5, 2.0])
def test_the_interval_holds_a_planted_power_of_depth_as_often_as_it_says(exponent):
    depths, rng, held = (1, 2, 4, 8), np.random.default_rng(0), []
    for _ in range(1000):
        medians = np.array(depths) ** exponent * np.exp(0.1 * rng.standard_normal((6, 4)))
        growth = fit_growth(depths, medians, "log depth")
        held.append(growth.low < exponent < growth.high)
    # Three standard errors of a share of 0.95 over 1000 draws.
    assert abs(np.mean(held) - 0.95) < 0.021


def test_the_law_that_holds_leaves_less():
    depths = (1, 2, 4, 8)
    medians = np.array([depths, depths]) ** 2.0
    assert fit_growth(depths, medians, "log depth").residual < fit_growth(depths, medians, "depth").residual


def test_a_planted_rate_a_layer_is_found_exactly():
    depths = (1, 3, 5)
    medians = np.exp(0.3 * np.array([depths, depths]))
    growth = fit_growth(depths, medians, "depth")
    assert_close(np.array([growth.slope, growth.low, growth.high]), np.full(3, 0.3))


def test_local_exponents_are_those_of_the_power_between_two_depths():
    medians = tuple(scale * np.array([1.0, 4.0, 8.0]) for scale in (1.0, 3.0))
    curve = DepthCurve(regime="random", gate="g1", medians=tuple(map(tuple, medians)), positive=(0, 0, 0), growth=())
    first, second = curve.local_exponents((1, 2, 4))
    assert_close(np.array([first.value, first.low, first.high]), np.full(3, 2.0))
    assert second.value == pytest.approx(1)


def test_while_steps_are_small_curvature_grows_as_the_square_of_depth():
    small = replace(SMALL, gates=("bma",), regimes=("structured",), step=0.001)
    (curve,) = run_depth(small).curves
    for exponent in curve.local_exponents(SMALL.depths):
        assert exponent.value == pytest.approx(2, abs=0.01)


def test_full_curvature_of_the_structured_stack_is_another_than_that_of_its_slices(result):
    full = run_depth(replace(SMALL, regimes=("structured",), tangent="full"))
    assert [curve.flat for curve in full.curves] == [True, False]
    slices = next(curve for curve in result.curves if (curve.regime, curve.gate) == ("structured", "bma"))
    assert not np.allclose(full.curves[1].medians, slices.medians, rtol=0.1)


def test_a_constant_half_flattens_the_random_stack_by_scale_alone():
    plain, half = run_depth(replace(SMALL, gates=("none", "output:input:constant"), regimes=("random",))).curves
    assert all(one > other for one, other in zip(plain.levels, half.levels, strict=True))


def test_without_a_gate_the_structured_stack_is_flat_and_the_random_one_is_not(result):
    flat = {(curve.regime, curve.gate): curve.flat for curve in result.curves}
    assert flat == {
        ("structured", "none"): True,
        ("structured", "bma"): False,
        ("random", "none"): False,
        ("random", "bma"): False,
    }
    assert "none stays flat at every depth" in finding(result)


def test_the_structured_stack_is_one_layer_with_equal_weights_that_turns_the_stream():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 6)))
    first, *rest = structured_stack("none", 3, x, SMALL, 0)
    assert all(layer is first for layer in rest)
    assert_close(first.trace(x).weights[:, 1], torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64))
    # A quarter turn: what is added at the first position is at a right angle to it, and a quarter as long.
    assert_close(first(x)[0] @ x[0], torch.zeros((), dtype=torch.float64))
    assert_close(first(x)[0].norm(), 0.25 * x[0].norm())
