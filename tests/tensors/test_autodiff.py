import numpy as np
import pytest
import torch
from closeness import assert_close
from libraries import JAX, NUMPY, TORCH

from tidegate.tensors.autodiff import central_differences, gradients
from tidegate.tensors.namespace import namespace_of

A, B = np.random.default_rng(0).standard_normal((2, 2, 3))


def function(named):
    xp = namespace_of(named["a"])
    return xp.sum(named["a"] ** 3 * named["b"]) + xp.sum(xp.sin(named["b"]))


EXPECTED = {"a": 3 * A**2 * B, "b": A**3 + np.cos(B)}


@pytest.mark.parametrize("library", [NUMPY, JAX, TORCH], ids=lambda library: library.name)
def test_gradients_are_the_derivatives(library):
    found = gradients(function, {"a": library.array(A), "b": library.array(B)})
    assert list(found) == ["a", "b"]
    for name, expected in EXPECTED.items():
        assert isinstance(found[name], library.kind)
        assert_close(found[name], expected, what="finite difference" if library is NUMPY else "gradient")


def test_the_step_of_central_differences_is_the_callers():
    """For a cube the error is eps² exactly."""
    found = central_differences(lambda named: np.sum(named["a"] ** 3), {"a": A}, eps=0.1)
    assert_close(found["a"], 3 * A**2 + 0.01)


def test_the_callers_tensors_are_left_alone():
    a, b = torch.from_numpy(A).requires_grad_(), torch.from_numpy(B)
    with torch.no_grad():
        found = gradients(function, {"a": a, "b": b})
    assert a.grad is None
    assert not b.requires_grad
    assert_close(found["b"], EXPECTED["b"], what="gradient")
