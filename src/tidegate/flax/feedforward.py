"""The feed-forward layer of a transformer block.

Legend: B batch, T positions, M model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._validation import InputError
from tidegate.config import FeedForwardKind
from tidegate.flax.params import Params


def init_feedforward(
    key: Array,
    d_model: int,
    d_ff: int,
    *,
    kind: FeedForwardKind = "swiglu",
    bias: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
    """Starting parameters: `up_proj` and, for swiglu, `gate_proj` have a `kernel` (M, F), `down_proj` one (F, M).

    Kernels are LeCun-normal; with them perhaps a `bias` of zeros.
    """
    if kind not in ("swiglu", "gelu"):
        raise InputError("kind", expected="'swiglu' or 'gelu'", got=kind)
    sizes = {"up_proj": (d_model, d_ff), "down_proj": (d_ff, d_model)}
    if kind == "swiglu":
        sizes = {"gate_proj": (d_model, d_ff)} | sizes
    lecun = jax.nn.initializers.lecun_normal()
    params: Params = {
        name: {"kernel": lecun(own, size, dtype)}
        for own, (name, size) in zip(jax.random.split(key, len(sizes)), sizes.items(), strict=True)
    }
    if bias:
        for name, (_, width) in sizes.items():
            params[name]["bias"] = jnp.zeros(width, dtype)
    return params


def apply_feedforward(params: Params, x_BTM: Array) -> Array:
    """Each position by itself, (B, T, M): the kind is swiglu where there is a `gate_proj`, else gelu.

    swiglu : (silu(x W_gate) ⊙ x W_up) W_down
    gelu   : gelu(x W_up) W_down, the exact gelu
    """
    up_BTF = _project(params["up_proj"], x_BTM)
    if "gate_proj" in params:
        inner_BTF = jax.nn.silu(_project(params["gate_proj"], x_BTM)) * up_BTF
    else:
        inner_BTF = jax.nn.gelu(up_BTF, approximate=False)
    return _project(params["down_proj"], inner_BTF)


def _project(projection: Mapping[str, Array], x: Array) -> Array:
    y = x @ projection["kernel"]
    return y + projection["bias"] if "bias" in projection else y
