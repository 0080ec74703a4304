import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from covers import axis, over

from tidegate.geometry import (
    PrecisionWarning,
    gaussian_curvature,
    intrinsic_curvature,
    intrinsic_scalar_curvature,
    scalar_curvature,
    second_fundamental_form,
    sectional_curvature,
)
from tidegate.geometry.differentiation import warn_of_single_precision
from tidegate.geometry.surfaces import cylinder, paraboloid, product, sphere, surfaces, torus

KINDS = {"torch": torch.from_numpy, "jax": jax.device_put}
SURFACES = {surface.name: surface for surface in surfaces()}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_surface = pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
every_surface_and_kind = over(surface=axis(SURFACES, "torus", "saddle"), kind=axis(KINDS))


def points(surface, count, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(surface.low, surface.high, (count, 2))


def assert_each_close(found, expected):
    """Compare point by point, so that each point has its own tolerance."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, what="gradient")


def rotation(rng, size):
    return torch.from_numpy(np.linalg.qr(rng.standard_normal((size, size)))[0])


@every_surface_and_kind
def test_the_gauss_equation_gives_the_closed_form(surface, kind):
    x = kind(points(surface, 40))
    found = gaussian_curvature(surface, x)
    assert type(found) is type(x)
    assert_close(found, surface.curvature(x), what="gradient")


@every_surface_and_kind
def test_the_christoffel_symbols_give_the_closed_form(surface, kind):
    x = kind(points(surface, 1)[0])
    u, v = np.random.default_rng(1).standard_normal((2, 2))
    assert_close(intrinsic_curvature(surface, x, u, v), surface.curvature(x), what="gradient")


@every_surface
def test_scalar_curvature_is_twice_the_gaussian_on_both_routes(surface):
    x = torch.from_numpy(points(surface, 10))
    assert_close(scalar_curvature(surface, x), 2 * surface.curvature(x), what="gradient")
    assert_close(intrinsic_scalar_curvature(surface, x[0]), 2 * surface.curvature(x[0]), what="gradient")


def bent(x):
    """A map from three coordinates to six dimensions, without symmetry."""
    xp = torch if isinstance(x, torch.Tensor) else jnp
    a, b, c = x[0], x[1], x[2]
    return xp.stack([a + b * c, xp.sin(b) + c, xp.exp(c / 2), a * b, xp.cos(a + c), a * a - b * c * c])


ROOT = np.random.default_rng(0).standard_normal((6, 6))
COVARIANCES = {
    "none": None,
    "number": 2.5,
    "vector": np.asarray([0.5, 1, 2, 0.7, 1.1, 3]),
    "matrix": ROOT @ ROOT.T + np.eye(6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("covariance", COVARIANCES.values(), ids=COVARIANCES)
def test_both_routes_agree_in_three_dimensions(covariance, kind):
    x, u, v = np.random.default_rng(1).standard_normal((3, 3))
    x = KINDS[kind](x)
    gauss = sectional_curvature(bent, x, u, v, covariance=covariance)
    assert_close(gauss, intrinsic_curvature(bent, x, u, v, covariance=covariance), what="gradient")
    if kind == "torch":
        total = scalar_curvature(bent, x, covariance=covariance)
        assert_close(total, intrinsic_scalar_curvature(bent, x, covariance=covariance), what="gradient")


def test_the_basis_of_a_plane_does_not_matter():
    rng = np.random.default_rng(0)
    x, u, v = rng.standard_normal((3, 20, 3))
    mix = rng.standard_normal((2, 2, 20, 1)) + 2 * np.eye(2)[..., None, None]
    x = torch.from_numpy(x)
    for tangent in ("full", "plane"):
        plain = sectional_curvature(bent, x, u, v, tangent=tangent)
        one, other = (a * u + b * v for a, b in mix)
        assert_each_close(sectional_curvature(bent, x, 1e6 * one, 1e-6 * other, tangent=tangent), plain)


@pytest.mark.parametrize("seed", range(3))
def test_full_curvature_ignores_a_change_of_coordinates(seed):
    rng = np.random.default_rng(seed)
    linear = torch.from_numpy(rng.standard_normal((3, 3)) + 3 * np.eye(3))

    def change(t):
        return linear @ (t + 0.1 * torch.sin(t))

    def push(t, direction):
        return torch.func.jvp(change, (t,), (direction,))[1]

    t, u, v = torch.from_numpy(rng.standard_normal((3, 7, 3)))
    there = [torch.func.vmap(push)(t, direction) for direction in (u, v)]
    plain = sectional_curvature(bent, torch.func.vmap(change)(t), *there)
    assert_each_close(sectional_curvature(lambda t: bent(change(t)), t, u, v), plain)


@pytest.mark.parametrize("seed", range(3))
def test_a_rotation_and_a_shift_of_the_outputs_change_nothing(seed):
    rng = np.random.default_rng(seed)
    turn, shift = rotation(rng, 8)[:, :6], torch.from_numpy(rng.standard_normal(8))
    x, u, v = torch.from_numpy(rng.standard_normal((3, 7, 3)))
    for tangent in ("full", "plane"):
        plain = sectional_curvature(bent, x, u, v, tangent=tangent)
        assert_each_close(sectional_curvature(lambda x: turn @ bent(x) + shift, x, u, v, tangent=tangent), plain)


@pytest.mark.parametrize("factor", [0.01, 0.7, 100.0])
def test_outputs_c_times_as_large_have_curvature_over_c_squared(factor):
    x, u, v = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 7, 3)))
    plain = sectional_curvature(bent, x, u, v)
    scaled = sectional_curvature(lambda x: factor * bent(x), x, u, v)
    assert_each_close(scaled * factor**2, plain)
    assert_each_close(sectional_curvature(bent, x, u, v, covariance=factor**-2), scaled)


def test_a_product_has_its_factors_curvature_and_none_across():
    first, second = torus(), sphere(0.5)
    both = product(first, second)
    x = torch.from_numpy(np.concatenate([points(first, 20), points(second, 20, seed=1)], axis=1))
    axes = np.eye(4)
    found = sectional_curvature(both, x[:, None], axes[[0, 2, 0, 1]], axes[[1, 3, 2, 3]])
    bends = first.curvature(x[:, :2])
    assert_each_close(found, [np.asarray([bend, 4.0, 0.0, 0.0]) for bend in bends])
    assert_each_close(scalar_curvature(both, x), 2 * (bends + 4))


def test_a_slice_of_a_flat_manifold_can_bend():
    # A flat chart of three coordinates into three dimensions: each slice is an ordinary surface in space.
    def curl(x):
        return torch.stack([x[0], x[1], x[2] + x[0] ** 2 + x[1] ** 2])

    x = torch.zeros(3, dtype=torch.float64)
    u, v, _ = np.eye(3)
    assert sectional_curvature(curl, x, u, v, tangent="plane").item() == pytest.approx(4.0)
    assert abs(sectional_curvature(curl, x, u, v, tangent="full").item()) < 1e-25


def test_affine_maps_are_flat_exactly():
    matrix = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 4)))
    x, u, v = np.random.default_rng(1).standard_normal((3, 6, 4))
    for tangent in ("full", "plane"):
        found = sectional_curvature(lambda x: matrix @ x + 1, torch.from_numpy(x), u, v, tangent=tangent)
        assert (found == 0).all()


@every_kind
def test_a_batch_is_its_points_one_by_one(kind):
    x, u = np.random.default_rng(5).standard_normal((2, 2, 3, 3))
    v = np.random.default_rng(6).standard_normal((3, 3))
    make = KINDS[kind]
    batch = sectional_curvature(bent, make(x), make(u), make(v))
    form = second_fundamental_form(bent, make(x), u, v)
    assert batch.shape == (2, 3)
    assert form.shape == (2, 3, 6)
    for i, j in ((0, 1), (1, 2)):
        alone = sectional_curvature(bent, make(x[i, j]), make(u[i, j]), make(v[j]))
        assert_close(batch[i, j], alone, what="gradient")
        alone = second_fundamental_form(bent, make(x[i, j]), u[i, j], v[j])
        assert_close(form[i, j], alone, what="gradient")


MEASURES = {
    "full": lambda f, x, u, v, **options: sectional_curvature(f, x, u, v, **options),
    "plane": lambda f, x, u, v, **options: sectional_curvature(f, x, u, v, tangent="plane", **options),
    "scalar": lambda f, x, u, v, **options: scalar_curvature(f, x, **options),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_chunks_change_nothing(measure):
    x, u, v = torch.from_numpy(np.random.default_rng(7).standard_normal((3, 5, 3)))
    calls = []

    def counted(x):
        calls.append(1)
        return bent(x)

    def run(max_bytes):
        calls.clear()
        return measure(counted, x, u, v, max_bytes=max_bytes), len(calls)

    (whole, once), (parts, often) = run(2**30), run(200)
    assert_close(parts, whole, what="gradient")
    assert often >= once + 4


def test_the_second_fundamental_form_is_normal_and_symmetric():
    rng = np.random.default_rng(0)
    x, u, v = torch.from_numpy(rng.standard_normal((3, 3)))
    variances = torch.from_numpy(rng.uniform(0.5, 2, 6))
    form = second_fundamental_form(bent, x, u, v, covariance=variances)
    assert_close(form, second_fundamental_form(bent, x, v, u, covariance=variances), what="gradient")
    jacobian = torch.func.jacfwd(bent)(x)
    assert_close(jacobian.T @ (form / variances), torch.zeros(3, dtype=torch.float64), what="gradient")
    assert form.abs().max() > 0.1


def test_single_precision_warns_once_and_keeps_some_digits():
    warn_of_single_precision.cache_clear()
    x = torch.from_numpy(points(paraboloid(), 20)).float()
    with pytest.warns(PrecisionWarning):
        found = gaussian_curvature(paraboloid(), x)
    # Warnings are errors here: a second one would raise.
    assert_close(gaussian_curvature(paraboloid(), x), found)
    assert found.dtype == torch.float32
    assert_close(found, paraboloid().curvature(x), what="gradient")
    assert gaussian_curvature(cylinder(), torch.from_numpy(points(cylinder(), 20)).float()).abs().max() < 1e-6
    single = gaussian_curvature(sphere(), jnp.asarray(points(sphere(), 20), dtype=jnp.float32))
    assert single.dtype == jnp.float32
    assert_close(single, np.full(20, 0.25, dtype=np.float32), what="gradient")


def test_a_module_is_measured_on_the_plain_kernel_and_leaves_no_graph():
    from tidegate.geometry import input_chart
    from tidegate.torch import GatedAttention

    torch.manual_seed(0)
    layer = GatedAttention(8, 2, gate="bma+g1", dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    u, v = np.random.default_rng(0).standard_normal((2, 3, 40))
    found = sectional_curvature(lambda p: layer(p.reshape(1, 5, 8)), x.reshape(-1), u, v, tangent="plane")
    assert not found.requires_grad
    chart = input_chart(layer.arrays(), x)
    assert_close(sectional_curvature(chart, chart.start, u, v, tangent="plane"), found, what="gradient")


def test_changed_weights_are_seen_by_the_next_call():
    scale = [jnp.asarray(1.0)]

    def f(x):
        return scale[0] * sphere(1.0)(x)

    x = jnp.asarray([0.2, 0.3])
    before = gaussian_curvature(f, x)
    scale[0] = jnp.asarray(2.0)
    assert_close(gaussian_curvature(f, x), before / 4, what="gradient")


def test_a_map_whose_second_derivative_pytorch_holds_as_nothing_is_flat():
    x, (u, v) = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    assert sectional_curvature(lambda x: torch.cat((2 * x + 1, x)), x, u, v) == 0
