import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_keys import key

N = 50_000


def drawn(given, dtype=jnp.float32):
    return np.asarray(jax.random.normal(given, N, dtype), np.float64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_numbers_are_normal_and_independent_of_their_neighbours(dtype):
    numbers = drawn(key(), dtype)
    # Six deviations each, of a mean, of a mean of squares, and of a correlation.
    assert abs(numbers.mean()) < 6 / N**0.5
    assert abs((numbers**2).mean() - 1) < 6 * (2 / N) ** 0.5
    assert abs((numbers[1:] * numbers[:-1]).mean()) < 6 / N**0.5


def test_keys_draw_their_own_numbers_and_always_the_same():
    assert np.array_equal(drawn(key(0)), drawn(key(0)))
    first, second = jax.random.split(key())
    keys = [key(), key(1), first, second, jax.random.split(first)[0], *(jax.random.fold_in(key(), i) for i in range(3))]
    streams = np.stack([drawn(one) for one in keys])
    correlations = streams @ streams.T / N - np.diag((streams**2).mean(axis=1))
    assert abs(correlations).max() < 6 / N**0.5
