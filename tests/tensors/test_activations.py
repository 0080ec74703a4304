import math

import numpy as np
import pytest
from closeness import assert_close, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit

from tidegate.tensors.activations import activate, activation_slope

ACTIVATIONS = ("sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh")
MATH = {
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    "silu": lambda z: z / (1 + math.exp(-z)),
    "softplus": lambda z: math.log1p(math.exp(z)),
    "tanh1": lambda z: 1 + math.tanh(z),
    "twosigmoid": lambda z: 2 / (1 + math.exp(-z)),
    "identity": lambda z: z,
    "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
    "tanh": math.tanh,
}
HUGE = np.array([-1e30, -800.0, -40.0, 0.0, 40.0, 800.0, 1e30])
logits = arrays(np.float64, (2, 3), elements=st.floats(-30, 30))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(z=logits)
def test_an_activation_is_its_formula(activation, z):
    assert_close(activate(activation, z), np.vectorize(MATH[activation])(z))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(z=logits)
def test_a_slope_is_the_derivative(activation, z):
    step = 1e-5
    rise = activate(activation, z + step) - activate(activation, z - step)
    assert_close(activation_slope(activation, z), rise / (2 * step), what="finite difference")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sigmoid_stays_between_its_ends_for_any_logit(library, dtype):
    values = to_numpy(library.call(lambda z: activate("sigmoid", z), HUGE.astype(dtype)))
    assert ((values >= 0) & (values <= 1)).all()
    assert (np.diff(values) >= 0).all()
    assert (values[0], values[3], values[-1]) == (0.0, 0.5, 1.0)


def both_of_each(z):
    return [f(a, z) for f in (activate, activation_slope) for a in ACTIVATIONS]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kind_and_dtype_are_kept_and_huge_logits_give_finite_numbers(library, dtype):
    for z in (np.linspace(-3, 3, 7, dtype=dtype), HUGE.astype(dtype)):
        for result in library.call(both_of_each, z):
            assert isinstance(result, library.kind)
            assert to_numpy(result).dtype == dtype
            assert result.shape == z.shape
            assert np.isfinite(to_numpy(result)).all()


def test_softplus_is_linear_far_right_and_zero_far_left():
    assert (activate("softplus", HUGE) == np.maximum(HUGE, 0))[[0, 1, 5, 6]].all()


@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, -80.0), (np.float64, -700.0)])
def test_a_nearly_closed_gate_keeps_its_digits(library, dtype, lowest):
    logits = np.linspace(lowest, 30.0, 221, dtype=dtype)
    expected = expit(logits.astype(np.float64))
    tolerance = 4 * np.finfo(dtype).eps
    found = to_numpy(library.call(activate, "sigmoid", logits))
    np.testing.assert_allclose(found, expected, rtol=tolerance * (1 + abs(lowest)), atol=0)
    slope = to_numpy(library.call(activation_slope, "sigmoid", logits))
    np.testing.assert_allclose(
        slope, expected * expit(-logits.astype(np.float64)), rtol=2 * tolerance * (1 + abs(lowest))
    )
