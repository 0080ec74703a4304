"""Random keys of a kind that compiles in a third of the time: JAX's own kinds take many rounds to draw a number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl


def mix(numbers):
    """A bijection of 32 bits, in which every bit of the result depends on every bit given."""
    numbers = (numbers ^ (numbers >> 16)) * np.uint32(0x7FEB352D)
    numbers = (numbers ^ (numbers >> 15)) * np.uint32(0x846CA68B)
    return numbers ^ (numbers >> 16)


def hashed(key, shape, *, start):
    """The hashes of key and place, the places counted from `start`."""
    places = np.uint32(start) + jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return mix(mix(places) ^ key[0])


def random_bits(key, width, shape):
    if width < 64:
        return hashed(key, shape, start=1 << 30).astype(f"uint{width}")
    high, low = (hashed(key, shape, start=start).astype(jnp.uint64) for start in (1 << 30, 2 << 30))
    return high << 32 | low


# Without it, 0 would be its own hash.
OFFSET = np.uint32(0x9E3779B9)
QUICK = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: mix(seed.astype(jnp.uint32) + OFFSET).reshape(1),
    split=lambda key, shape: hashed(key, shape, start=3 << 30)[..., None],
    random_bits=random_bits,
    fold_in=lambda key, number: mix(mix(number.astype(jnp.uint32) + OFFSET) ^ key),
    name="quick",
    tag="quick",
)


def key(seed=0):
    """A key for what is compiled once or twice."""
    return jax.random.key(seed, impl=QUICK)
