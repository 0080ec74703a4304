import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from layers import make_layer

from tidegate.geometry import (
    GeometryError,
    agreement_with_curvature,
    input_chart,
    second_difference_ratio,
    step_linearity,
)
from tidegate.geometry.surfaces import cylinder, paraboloid, saddle, sphere

X = torch.tensor([0.3, 0.4], dtype=torch.float64)
U, V = np.eye(2)


def rectangle(surface, count):
    return torch.from_numpy(np.random.default_rng(0).uniform(surface.low, surface.high, (count, 2)))


@pytest.mark.parametrize("make", [torch.from_numpy, jnp.asarray], ids=["torch", "jax"])
def test_the_ratio_tends_to_half_the_second_over_the_first_derivative(make):
    radius = 1.5
    found = second_difference_ratio(cylinder(radius), make(X.numpy()), U, step=1e-4)
    assert type(found) is type(make(X.numpy()))
    assert_close(np.asarray(found), np.asarray(0.5), what="finite difference")


def test_a_batch_of_points_is_measured_together():
    x = rectangle(saddle(), 6).reshape(2, 3, 2)
    directions = np.random.default_rng(1).standard_normal((3, 2))
    found = second_difference_ratio(saddle(), x, directions)
    assert found.shape == (2, 3)
    assert_close(found[1, 2], second_difference_ratio(saddle(), x[1, 2], directions[2]), what="gradient")


def test_where_there_is_a_second_derivative_the_ratio_grows_with_the_step():
    check = step_linearity(sphere(), X, U + V)
    assert check.slope == pytest.approx(1, abs=1e-3)
    assert check.linear


def test_a_kink_and_rounding_noise_are_not_linear():
    kink = step_linearity(lambda x: torch.stack([x[0].abs(), x[0]]), torch.zeros(2, dtype=torch.float64), U)
    assert kink.slope == pytest.approx(0, abs=1e-6)
    assert not kink.linear
    affine = step_linearity(lambda x: 3 * x + 0.1, X, U + 0.3 * V, steps=np.geomspace(1e-9, 1e-6, 9))
    assert not affine.linear
    exact_zero = step_linearity(lambda x: x, torch.zeros(2, dtype=torch.float64), U)
    assert exact_zero.slope == -np.inf
    assert not exact_zero.linear


def test_the_proxy_raises_a_false_alarm_on_every_cylinder():
    found = agreement_with_curvature(cylinder(), rectangle(cylinder(), 30), U, V)
    assert (found.false_alarms, found.misses) == (1.0, 0.0)


def test_the_proxy_misses_a_saddle_along_its_rulings():
    found = agreement_with_curvature(saddle(), rectangle(saddle(), 30), U, V)
    assert (found.false_alarms, found.misses) == (0.0, 1.0)
    assert (found.curvature < 0).all()


def test_the_proxy_follows_the_curvature_of_a_paraboloid():
    x = rectangle(paraboloid(), 60)
    found = agreement_with_curvature(paraboloid(), x, U, V)
    assert found.correlation > 0.8
    assert_close(found.curvature, paraboloid().curvature(x), what="gradient")
    assert agreement_with_curvature(lambda x: torch.cat([x, x]), X, U, V).correlation is None


def test_bad_arguments_are_named():
    with rejects("step"):
        second_difference_ratio(sphere(), X, U, step=0)
    with rejects("steps"):
        step_linearity(sphere(), X, U, steps=[1e-3, 1e-3])
    with rejects("x"):
        step_linearity(sphere(), X.expand(3, 2), U)
    with pytest.raises(GeometryError):
        second_difference_ratio(lambda x: x[:1], X, V)
    with pytest.raises(GeometryError):
        second_difference_ratio(lambda x: torch.sqrt(x - 0.3), X, U)


def test_a_layer_whose_gates_read_side_by_side_is_measured():
    layer = make_layer("bma+dense:output", seed=0)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 6)))
    chart = input_chart(layer, x)
    u, v = np.random.default_rng(1).standard_normal((2, 3, chart.dimension))
    found = agreement_with_curvature(chart, chart.start, u, v)
    assert found.proxy.shape == found.curvature.shape == (3,)
    assert (found.proxy > 0).all()
