import math

import numpy as np
import pytest
from closeness import assert_close, naming, to_numpy
from errors import rejects
from hypothesis import given
from hypothesis import strategies as st
from slow import slow_rotation

from tidegate.tensors.rotary import Rotary, rotary_angles, rotate


def sample(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def located(x, positions, rotary):
    return rotate(x, rotary_angles(positions, x.shape[-1], rotary, like=x))


VARIANTS = [
    Rotary(),
    Rotary(base=50.0),
    Rotary(fraction=0.5),
    Rotary(scale=4.0),
    Rotary(offset=7),
    Rotary(base=10.0, fraction=0.25, scale=0.5, offset=-3),
]


@pytest.mark.parametrize("rotary", VARIANTS, ids=str)
@given(shift=st.integers(-50, 50))
def test_scores_depend_on_the_difference_of_positions_only(rotary, shift):
    q, k = sample(5, 8), sample(4, 8, seed=1)
    at, other = np.array([0, 3, 1, 9, 20]), np.array([2, 0, 11, 5])
    near = located(q, at, rotary) @ located(k, other, rotary).T
    far = located(q, at + shift, rotary) @ located(k, other + shift, rotary).T
    assert_close(near, far)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_rotation_is_the_complex_product_pair_by_pair_and_keeps_norms(library, dtype):
    x, positions = sample(2, 3, 4, 8, dtype=dtype), np.array([0, 1, 5, 30])
    # In one call, which JAX compiles once.
    found = library.call(lambda x, p: [located(x, p, rotary) for rotary in VARIANTS], x, positions)
    for rotary, turned in zip(VARIANTS, found, strict=True):
        with naming(rotary):
            assert isinstance(turned, library.kind)
            assert to_numpy(turned).dtype == dtype
            expected = [
                [[slow_rotation(v, p, rotary) for v, p in zip(head, positions, strict=True)] for head in b] for b in x
            ]
            assert_close(turned, np.array(expected))
            assert_close(np.linalg.norm(to_numpy(turned), axis=-1), np.linalg.norm(x, axis=-1))


def test_position_zero_stays_and_the_negative_angle_turns_back():
    x = sample(3, 8)
    assert (located(x, np.zeros(3, dtype=int), Rotary()) == x).all()
    angles = rotary_angles(np.arange(3), 8, Rotary(), like=x)
    assert_close(rotate(rotate(x, angles), -angles), x)


def test_positions_may_differ_by_batch(library):
    x, positions = sample(2, 3, 4, 8), np.array([[0, 1, 2, 3], [5, 6, 7, 8]])
    turned = library.call(lambda x, p: rotate(x, rotary_angles(p, 8, Rotary(), like=x)[:, None]), x, positions)
    for b in range(2):
        assert_close(to_numpy(turned)[b], located(x[b], positions[b], Rotary()))


def test_real_positions_are_allowed_and_half_precision_turns_by_float32_angles(library):
    def both(positions, x, half):
        return rotary_angles(positions, 2, Rotary(), like=x), rotary_angles(np.arange(3), 4, Rotary(), like=half)

    angles, wide = library.call(both, np.array([0.5, 1.5]), sample(1), sample(3, 4, dtype=np.float16))
    assert_close(angles, np.array([[0.5], [1.5]]))
    assert to_numpy(wide).dtype == np.float32


def test_a_width_is_the_share_of_the_head():
    assert [Rotary(fraction=f).width(n) for f, n in ((1.0, 8), (0.25, 8), (1 / 3, 6))] == [8, 2, 2]
    assert Rotary(base=100.0).frequencies(4) == [1.0, 0.1]


def test_options_out_of_range_are_rejected():
    for fraction, head_dim in ((1.0, 7), (0.5, 6), (0.3, 8), (0.01, 8), (0.55, 4)):
        with rejects("Rotary.fraction"):
            Rotary(fraction=fraction).width(head_dim)
    for fraction in (0.0, -0.5, 1.5, math.nan):
        with rejects("Rotary.fraction"):
            Rotary(fraction=fraction)
    for name in ("base", "scale"):
        for value in (0.0, -1.0, math.inf, math.nan):
            with rejects(f"Rotary.{name}"):
                Rotary(**{name: value})
