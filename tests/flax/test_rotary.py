import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_layers import quick_jit, sample

from tidegate.flax.attention import rotary_angles, rotate
from tidegate.tensors.rotary import Rotary


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_angles_are_wide_and_what_is_turned_keeps_its_dtype(dtype):
    angles = quick_jit(lambda positions: rotary_angles(positions, 8, Rotary(), dtype))(np.arange(4096))
    assert angles.dtype == np.float32
    assert angles.shape == (4096, 1, 4)
    assert angles[4095, 0, 0] == 4095
    turned = jax.eval_shape(rotate, sample(1, 4096, 1, 8, dtype=dtype), angles)
    assert (turned.shape, turned.dtype) == ((1, 4096, 1, 8), dtype)
