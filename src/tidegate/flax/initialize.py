"""The values that a model starts from."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
from jax import Array

from tidegate.flax.params import Params, dotted_path

_STD = 0.02
_MATRICES = ("kernel", "embedding")
_WRITERS = ("o_proj", "down_proj")


def initialize(key: Array, params: Params, *, num_layers: int) -> Params:
    """Draw the matrices of a model's parameters anew.

    Kernels and embeddings come from N(0, 0.02²), those that write to the residual stream of n blocks from
    N(0, 0.02² / 2n); gates, norms, metrics and biases stay as they are.

    Each array draws from a key of its own, which depends on the given one and on the array's name alone: variants that
    are made with the same key start with equal values in every matrix that they have in common.

    params     : nested dictionaries; the last two names say what an array is, such as `o_proj` and `kernel`
    num_layers : n
    """

    def draw(path: tuple[Any, ...], array: Array) -> Array:
        name = dotted_path(path)
        *_, owner, leaf = name.split(".")
        if leaf not in _MATRICES:
            return array
        std = _STD / math.sqrt(2 * num_layers) if owner in _WRITERS else _STD
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return std * jax.random.normal(own, array.shape, array.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)
