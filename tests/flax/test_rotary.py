import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, naming
from jax_layers import quick_jit, sample
from torch_layers import ROTARY

from tidegate.flax.attention import rotary_angles, rotate
from tidegate.tensors import rotary as reference
from tidegate.tensors.rotary import Rotary

VARIANTS = [Rotary(), ROTARY, Rotary(fraction=0.25, scale=0.5, offset=-3)]
POSITIONS = [np.arange(5), np.array([7, 0, 3, 3, 100]), np.array([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])]


@pytest.mark.parametrize("positions", POSITIONS, ids=["count", "row", "rows"])
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_rotation_is_that_of_the_tensors(positions, dtype):
    x = sample(2, 5, 3, 8, dtype=dtype)

    def each(x, positions):
        return [rotate(x, rotary_angles(positions, 8, rotary, dtype)) for rotary in VARIANTS]

    for rotary, turned in zip(VARIANTS, quick_jit(each)(x, positions), strict=True):
        angles = reference.rotary_angles(positions, 8, rotary, like=x)
        expected = np.swapaxes(reference.rotate(np.swapaxes(x, 1, 2), np.expand_dims(angles, -3)), 1, 2)
        with naming(rotary):
            assert turned.dtype == dtype
            assert_close(turned, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_angles_are_wide_and_what_is_turned_keeps_its_dtype(dtype):
    angles = quick_jit(lambda positions: rotary_angles(positions, 8, Rotary(), dtype))(np.arange(4096))
    assert angles.dtype == np.float32
    assert angles.shape == (4096, 1, 4)
    assert angles[4095, 0, 0] == 4095
    turned = jax.eval_shape(rotate, sample(1, 4096, 1, 8, dtype=dtype), angles)
    assert (turned.shape, turned.dtype) == ((1, 4096, 1, 8), dtype)
