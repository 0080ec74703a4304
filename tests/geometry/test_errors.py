import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import naming
from errors import rejects

from tidegate.geometry import (
    GeometryError,
    categorical_chart,
    fisher_rao_metric,
    gaussian_curvature,
    intrinsic_curvature,
    scalar_curvature,
    second_fundamental_form,
    sectional_curvature,
)
from tidegate.geometry.surfaces import cone, sphere

X = torch.tensor([0.3, 0.4], dtype=torch.float64)
U, V = np.eye(2)


def of_rank(rank):
    """Expect a GeometryError about tangent vectors that span so many dimensions."""
    return pytest.raises(
        GeometryError, check=lambda error: error.rank == rank and error.smallest_singular_value < 1e-12
    )


def test_parallel_and_zero_directions_span_no_plane():
    with of_rank(1):
        sectional_curvature(sphere(), X, U, -3 * U)
    with of_rank(1):
        sectional_curvature(sphere(), X, U, 0 * V)
    with pytest.raises(GeometryError, match="at point 2 of 3"):
        sectional_curvature(sphere(), X, U, np.stack([V, V, 2 * U]))


def test_the_tip_of_a_cone_is_rejected_on_every_route():
    tip = torch.tensor([0.5, 0.0], dtype=torch.float64)
    for measure in (gaussian_curvature, scalar_curvature):
        with of_rank(1):
            measure(cone(), tip)
    with of_rank(1):
        second_fundamental_form(cone(), tip, U, U)
    with pytest.raises(GeometryError):
        intrinsic_curvature(cone(), tip, U, V)


def test_fewer_outputs_than_coordinates_is_a_lower_rank():
    x, (u, v, _) = torch.ones(3, dtype=torch.float64), np.eye(3)
    with of_rank(2):
        sectional_curvature(lambda x: x[:2] ** 2, x, u, v)


@pytest.mark.parametrize("step", [torch.round, torch.Tensor.detach, torch.sign], ids=["round", "detach", "sign"])
def test_a_step_without_slope_has_rank_zero(step):
    with of_rank(0):
        gaussian_curvature(lambda x: torch.cat([step(x), step(x)]), X)


def test_an_operation_without_forward_mode_is_rejected():
    class Hidden(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad

    with pytest.raises(GeometryError):
        gaussian_curvature(lambda x: torch.cat([x, Hidden.apply(x)]), X)


@pytest.mark.parametrize(
    "x", [torch.tensor([1, 2]), jnp.asarray([1, 2]), torch.ones(2, dtype=torch.bfloat16), np.asarray([0.3, 0.4])]
)
def test_integers_half_precision_and_numpy_points_are_rejected(x):
    with pytest.raises(TypeError, match="x must be"):
        gaussian_curvature(sphere(), x)


@pytest.mark.parametrize("make", [torch.from_numpy, jnp.asarray], ids=["torch", "jax"])
def test_a_function_gives_one_array_of_its_points_dtype(make):
    x = make(np.asarray([0.3, 0.4]))
    results = {"two arrays": lambda x: (x, x), "bool": lambda x: x > 0, "float32": lambda x: x.astype("float32")}
    if isinstance(x, torch.Tensor):
        results["float32"] = torch.Tensor.float
    for case, f in results.items():
        with naming(case), pytest.raises(TypeError, match="f must return"):
            gaussian_curvature(f, x)


COVARIANCES = {
    "a negative number": -1.0,
    "a vector with a zero": np.asarray([1.0, 0.0, 1.0]),
    "a singular matrix": np.ones((3, 3)),
    "an asymmetric matrix": np.eye(3) + np.eye(3, k=1),
    "a nan": float("nan"),
}


@pytest.mark.parametrize("measure", [gaussian_curvature, fisher_rao_metric])
def test_a_covariance_is_positive_definite_and_fits(measure):
    for case, covariance in COVARIANCES.items():
        with naming(case), pytest.raises(GeometryError):
            measure(sphere(), X, covariance=covariance)
    for covariance in (np.eye(2), np.ones(4), np.ones((3, 1))):
        with rejects("covariance"):
            measure(sphere(), X, covariance=covariance)


def test_nan_is_found_in_points_directions_and_derivatives():
    with pytest.raises(GeometryError):
        gaussian_curvature(sphere(), torch.tensor([0.1, np.nan], dtype=torch.float64))
    with pytest.raises(GeometryError):
        sectional_curvature(sphere(), X, U + np.inf, V)
    points = torch.tensor([[0.1, 0.2], [-0.1, 0.2]], dtype=torch.float64)
    with pytest.raises(GeometryError, match="at point 1 of 2"):
        gaussian_curvature(lambda x: torch.stack([x[0].sqrt(), x[1], x[0] * x[1]]), points)
    with pytest.raises(GeometryError):
        gaussian_curvature(categorical_chart(lambda x: torch.stack([x[0], x[1], 0 * x[0]])), X)


def test_shapes_that_do_not_fit_are_named():
    with rejects("u"):
        sectional_curvature(sphere(), X.expand(3, 2), np.ones((4, 2)), V)
    with rejects("x", hint="sectional_curvature"):
        gaussian_curvature(sphere(), torch.ones(3, dtype=torch.float64))
    with rejects("x"):
        intrinsic_curvature(sphere(), X.expand(3, 2), U, V)
    with rejects("x"):
        gaussian_curvature(sphere(), torch.ones(0, 2, dtype=torch.float64))


def test_a_jacobian_beyond_the_budget_is_rejected_before_it_is_built():
    def wide(x):
        return torch.cat([x, x**2])

    x = torch.ones(20_000, dtype=torch.float64)
    u, v = np.random.default_rng(0).standard_normal((2, 20_000))
    with pytest.raises(GeometryError):
        sectional_curvature(wide, x, u, v)
    assert sectional_curvature(wide, x, u, v, tangent="plane").isfinite()


def test_options_are_checked():
    with rejects("tangent"):
        sectional_curvature(sphere(), X, U, V, tangent="slice")
    with rejects("max_bytes"):
        gaussian_curvature(sphere(), X, max_bytes=0)
    with pytest.raises(TypeError, match="f must be a function"):
        gaussian_curvature(3.0, X)
    with pytest.raises(TypeError, match="jit"):
        jax.jit(lambda x: gaussian_curvature(sphere(), x))(jnp.asarray([0.1, 0.2]))
