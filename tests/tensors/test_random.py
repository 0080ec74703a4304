import jax
import numpy as np
import pytest
import torch
from closeness import to_numpy

from tidegate.tensors.random import normal, split

KEYS = {
    "numpy": (lambda: np.random.default_rng(0), np.ndarray, "float64"),
    "torch": (lambda: torch.Generator().manual_seed(0), torch.Tensor, "float32"),
    "jax": (lambda: jax.random.key(0), jax.Array, "float64"),
    "jax, raw": (lambda: jax.random.PRNGKey(0), jax.Array, "float64"),
}


@pytest.mark.parametrize(("make", "kind", "dtype"), KEYS.values(), ids=KEYS)
def test_numbers_are_standard_normal_of_the_keys_kind(make, kind, dtype):
    numbers = normal(make(), (50, 40))
    assert isinstance(numbers, kind)
    assert numbers.shape == (50, 40)
    assert to_numpy(numbers).dtype == dtype
    assert abs(to_numpy(numbers).mean()) < 0.1
    assert abs(to_numpy(numbers).std() - 1) < 0.1
    assert (to_numpy(normal(make(), (50, 40))) == to_numpy(numbers)).all()


@pytest.mark.parametrize(("make", "kind", "dtype"), KEYS.values(), ids=KEYS)
def test_split_keys_give_different_numbers(make, kind, dtype):
    keys = split(make(), 3)
    assert isinstance(keys, list)
    assert len(keys) == 3
    drawn = [to_numpy(normal(key, (4,))) for key in keys]
    assert len({tuple(numbers) for numbers in drawn}) == 3


def test_a_key_may_be_traced():
    traced = jax.jit(lambda key: normal(split(key, 2)[1], (3,)))(jax.random.key(1))
    assert (traced == normal(split(jax.random.key(1), 2)[1], (3,))).all()


@pytest.mark.parametrize("key", [0, None, np.random.RandomState(0), torch.zeros(2)], ids=lambda key: type(key).__name__)
def test_what_is_no_key_is_rejected(key):
    message = (
        rf"^key must be a numpy\.random\.Generator, a torch\.Generator or a JAX key, got {type(key).__name__}\. "
        r"For a seed write numpy\.random\.default_rng\(seed\)\.$"
    )
    with pytest.raises(TypeError, match=message):
        normal(key, (2,))
    with pytest.raises(TypeError, match=message):
        split(key, 2)
