"""Which numbers a computation in half precision may round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tidegate.flax.attention import Params
from tidegate.flax.params import dotted


def cast_params(params: Params, dtype: jax.typing.DTypeLike | None) -> Params:
    """The parameters in the dtype of a computation; those of gates in float32 or better, as their logits are.

    dtype : None leaves all as they are
    """
    if dtype is None:
        return params

    def cast(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        is_gate = "attn_gate" in dotted(path).split(".")
        return array.astype(jnp.promote_types(dtype, jnp.float32) if is_gate else dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
