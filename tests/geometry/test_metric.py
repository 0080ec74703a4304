import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st

from tidegate.geometry import (
    categorical_chart,
    christoffel_symbols,
    fisher_rao_metric,
    intrinsic_curvature,
    riemann_tensor,
    sectional_curvature,
)
from tidegate.geometry.surfaces import sphere, torus
from tidegate.tensors import fisher_metric, softmax_rows

COVARIANCES = {
    "none": None,
    "number": 1.7,
    "vector": np.asarray([0.5, 1.0, 3.0]),
    "matrix": np.asarray([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.7]]),
}


def as_matrix(covariance):
    if covariance is None:
        return np.eye(3)
    return np.asarray(covariance) * np.eye(3) if np.ndim(covariance) < 2 else covariance


def softmax_chart(x):
    """Return probabilities of n + 1 categories from n logits; the last logit is 0."""
    xp = torch if isinstance(x, torch.Tensor) else jnp
    return softmax_rows(xp.concatenate([x, 0 * x[:1]]))


@pytest.mark.parametrize("name", COVARIANCES)
def test_the_metric_is_the_pullback_of_the_precision(name):
    covariance = COVARIANCES[name]
    x = torch.tensor([[0.3, 0.4], [0.1, 2.0]], dtype=torch.float64)
    found = fisher_rao_metric(torus(), x, covariance=covariance)
    for point, metric in zip(x, found, strict=True):
        jacobian = torch.func.jacfwd(torus())(point).numpy()
        assert_close(metric, jacobian.T @ np.linalg.inv(as_matrix(covariance)) @ jacobian, what="gradient")


@pytest.mark.parametrize("make", [torch.from_numpy, jax.device_put], ids=["torch", "jax"])
def test_a_covariance_may_come_in_any_kind_and_form(make):
    x, u, v = np.asarray([[0.3, 0.4], [1.0, 0.0], [0.2, 1.0]])
    diagonal = COVARIANCES["vector"]
    forms = [diagonal, np.diag(diagonal), make(diagonal), make(np.diag(diagonal))]
    first, *rest = (sectional_curvature(torus(), make(x), u, v, covariance=form) for form in forms)
    for found in rest:
        assert_close(found, first, what="gradient")


def test_a_singular_metric_is_given_as_it_is():
    found = fisher_rao_metric(lambda x: x.sum() * torch.ones(3).double(), torch.ones(2, dtype=torch.float64))
    assert_close(found, 3 * torch.ones(2, 2, dtype=torch.float64), what="gradient")


@pytest.mark.parametrize("make", [torch.from_numpy, jax.device_put], ids=["torch", "jax"])
@pytest.mark.parametrize("categories", [3, 5])
def test_the_full_simplex_has_curvature_one_quarter(categories, make):
    rng = np.random.default_rng(categories)
    x, u, v = rng.standard_normal((3, 4, categories - 1))
    chart = categorical_chart(softmax_chart)
    assert_close(sectional_curvature(chart, make(x), u, v), np.full(4, 0.25), what="gradient")


def test_the_full_simplex_has_curvature_one_quarter_on_the_intrinsic_route():
    x, u, v = np.random.default_rng(0).standard_normal((3, 3))
    found = intrinsic_curvature(categorical_chart(softmax_chart), torch.from_numpy(x), u, v)
    assert_close(found, np.asarray(0.25), what="gradient")


def test_the_metric_of_categories_is_that_of_the_gibbs_family():
    x = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64)
    expected = fisher_metric(softmax_chart(x))[:3, :3]
    assert_close(fisher_rao_metric(categorical_chart(softmax_chart), x), expected, what="gradient")


def test_a_sphere_has_its_christoffel_symbols():
    latitude = 0.4
    found = christoffel_symbols(sphere(3.0), torch.tensor([latitude, 1.0], dtype=torch.float64))
    expected = np.zeros((2, 2, 2))
    expected[0, 1, 1] = np.sin(latitude) * np.cos(latitude)
    expected[1, 0, 1] = expected[1, 1, 0] = -np.tan(latitude)
    assert_close(found, expected, what="gradient")


@given(seed=st.integers(0, 2**16))
def test_the_riemann_tensor_has_its_symmetries(seed):
    rng = np.random.default_rng(seed)
    matrix = torch.from_numpy(rng.standard_normal((5, 3)))
    x = torch.from_numpy(rng.standard_normal(3))
    tensor = riemann_tensor(lambda x: torch.cat([matrix @ x, torch.sin(matrix @ x) * x.sum()]), x)
    assert_close(tensor, -tensor.transpose(0, 1), what="gradient")
    assert_close(tensor, -tensor.transpose(2, 3), what="gradient")
    assert_close(tensor, tensor.permute(2, 3, 0, 1), what="gradient")
    cyclic = tensor + tensor.permute(0, 2, 3, 1) + tensor.permute(0, 3, 1, 2)
    assert cyclic.abs().max() <= 1e-10 * (1 + tensor.abs().max())
