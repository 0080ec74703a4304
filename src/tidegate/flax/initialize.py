"""The values that a model starts from."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
from jax import Array

from tidegate.config import Init, embedding_std, init_std
from tidegate.flax.params import Params, dotted_path

_WRITERS = ("o_proj", "down_proj")


def initialize(key: Array, params: Params, *, init: Init, num_layers: int) -> Params:
    """Draw the matrices of a model's parameters anew.

    Kernels and embeddings start as `tidegate.config.init_std` and `embedding_std` say; gates, norms and
    metrics stay as they are, and so do biases, but with `torch`, where they are uniform like the kernel beside them.

    Each array draws from a key of its own, which depends on the given one and on the array's name alone: variants that
    are made with the same key start with equal values in every matrix that they have in common.

    params     : nested dictionaries; the last two names say what an array is, such as `o_proj` and `kernel`
    num_layers : n
    """
    fans_in = _fans_in(params)

    def draw(path: tuple[Any, ...], array: Array) -> Array:
        name = dotted_path(path)
        *_, owner, leaf = name.split(".")
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if leaf == "embedding":
            return embedding_std(init) * jax.random.normal(own, array.shape, array.dtype)
        if leaf == "bias" and init == "torch" and owner in fans_in:
            return jax.random.uniform(own, array.shape, array.dtype, -1, 1) * fans_in[owner] ** -0.5
        if leaf != "kernel":
            return array
        std = init_std(init, fan_in=fans_in[owner], num_layers=num_layers, writes=owner in _WRITERS)
        if init == "torch":
            return math.sqrt(3) * std * jax.random.uniform(own, array.shape, array.dtype, -1, 1)
        return std * jax.random.normal(own, array.shape, array.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def _fans_in(params: Params) -> dict[str, int]:
    """Numbers that one result of each kernel is made of, by the name of its owner."""
    kernels: dict[str, int] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        *_, owner, leaf = dotted_path(path).split(".")
        if leaf == "kernel":
            # Heads stand in the middle of kernels that read the stream, and in front of the one that writes to it.
            kernels[owner] = math.prod(array.shape[:-1]) if owner in _WRITERS else array.shape[0]
    return kernels
