"""Transformer blocks, and a stack of them: what every model is built from.

Legend: B batch, T positions, M model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._refusals import require_num_caches
from tidegate.config import NormKind, StackConfig
from tidegate.flax.attention import Params, gated_attention, init_attention
from tidegate.flax.attention_config import AttentionConfig
from tidegate.flax.cache import KVCache
from tidegate.flax.feedforward import apply_feedforward, init_feedforward
from tidegate.flax.gate import widened
from tidegate.flax.initialize import initialize
from tidegate.tensors.layer import rms_norm

Caches: TypeAlias = Sequence[KVCache] | KVCache
"""A cache for each block, or for stacked blocks one whose arrays have a first axis of layers."""

_EPSILON = {"rms": 1e-6, "layer": 1e-5}
# What the configuration of a stack calls by another name than that of a layer.
_STACK_NAMES = {"dropout": "attention_dropout", "window": "reach"}


def attention_config(config: StackConfig) -> AttentionConfig:
    """The options of a block's attention layer."""
    names = {option.name: _STACK_NAMES.get(option.name, option.name) for option in fields(AttentionConfig)}
    return AttentionConfig(**{own: getattr(config, name) for own, name in names.items()})


def init_block(key: Array, config: StackConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Starting parameters of a block, as `initialize` draws them.

    `attention` as `init_attention` names them, `feedforward` as `init_feedforward`, and `attention_norm` and
    `feedforward_norm` with a `scale` (M,), layer norms perhaps with a `bias`.
    """
    params: Params = {
        "attention_norm": _init_norm(config, dtype),
        "attention": init_attention(key, attention_config(config), dtype=dtype),
        "feedforward_norm": _init_norm(config, dtype),
        "feedforward": init_feedforward(
            key, config.d_model, config.feedforward_width, kind=config.feedforward, bias=config.bias, dtype=dtype
        ),
    }
    return initialize(key, params, num_layers=config.num_layers)


def apply_block(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    *,
    mask: Array | None = None,
    cache: KVCache | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    dropout_key: Array | None = None,
) -> Any:
    """The stream after this block (B, T, M), and with a cache also the new cache.

    The options are those of `gated_attention`; the key serves dropout of the weights and of both branches.
    """
    weights_key, branch_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    attended = gated_attention(
        params["attention"],
        apply_norm(params["attention_norm"], x_BTM, config.norm),
        attention_config(config),
        mask=mask,
        cache=cache,
        positions=positions,
        segment_ids=segment_ids,
        is_causal=config.causal,
        dropout_key=weights_key,
    )
    y_BTM, cache = (attended, None) if cache is None else attended
    x_BTM = residual_block(params, x_BTM, y_BTM, config, dropout_key=branch_key)
    return x_BTM if cache is None else (x_BTM, cache)


def residual_block(
    params: Params, x_BTM: Array, attended_BTM: Array, config: StackConfig, *, dropout_key: Array | None = None
) -> Array:
    """The stream x + attended, and of that x + feedforward(norm(x)): a block, once its attention is there."""
    first, second = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    x_BTM = x_BTM + drop(attended_BTM, config.dropout, first)
    y_BTM = apply_feedforward(params["feedforward"], apply_norm(params["feedforward_norm"], x_BTM, config.norm))
    return x_BTM + drop(y_BTM, config.dropout, second)


def init_stack(key: Array, config: StackConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Starting parameters: `blocks`, a list, and the `norm` at the end."""
    keys = [jax.random.fold_in(key, index) for index in range(config.num_layers)]
    blocks = [init_block(key, config.block(index), dtype=dtype) for index, key in enumerate(keys)]
    return {"blocks": blocks, "norm": _init_norm(config, dtype)}


def apply_stack(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    *,
    mask: Array | None = None,
    caches: Caches | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, Caches | None]:
    """The embeddings (B, T, M) through all blocks and the norm, and the new caches if there were some.

    Blocks that are stacked (`stack_layers`) run under `jax.lax.scan`, so that a deep model compiles as fast as one
    block. The other options are those of `apply_block`.
    """
    blocks = params["blocks"]
    scanned = isinstance(blocks, Mapping)
    num_layers = jax.tree.leaves(blocks)[0].shape[0] if scanned else len(blocks)
    _require_caches(caches, num_layers, scanned=scanned)

    def step(x_BTM: Array, layer: Any) -> tuple[Array, Any]:
        block, cache, key = layer
        options = {"mask": mask, "positions": positions, "segment_ids": segment_ids}
        result = apply_block(block, x_BTM, config, cache=cache, dropout_key=key, **options)
        return (result, None) if cache is None else result

    if config.checkpoint_blocks:
        # Inside a scan nothing can be merged across the recomputation, so that nothing need prevent it.
        step = jax.checkpoint(step, prevent_cse=not scanned)
    own_key, keys = (None, None) if dropout_key is None else _split(dropout_key, num_layers)
    x_BTM = drop(x_BTM, config.dropout, own_key)
    run = jax.lax.scan if scanned else _looped
    x_BTM, caches = run(step, x_BTM, (blocks, caches, keys))
    return apply_norm(params["norm"], x_BTM, config.norm), caches


def stack_layers(layers: Sequence[Any]) -> Any:
    """Pytrees of one structure as one, whose arrays have a first axis of layers; for blocks, and for their caches."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """What `stack_layers` stacked."""
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda array, i=layer: array[i], stacked) for layer in range(num_layers)]


def apply_norm(params: Params, x: Array, kind: NormKind) -> Array:
    """The root-mean-square or layer norm over the last axis, in float32 or better; of x's dtype."""
    if kind == "rms":
        return rms_norm(x, params["scale"], epsilon=_EPSILON[kind])
    centred = widened(x) - jnp.mean(widened(x), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + _EPSILON[kind])
    scaled = normed.astype(x.dtype) * params["scale"]
    return scaled + params["bias"] if "bias" in params else scaled


def drop(x: Array, share: float, key: Array | None) -> Array:
    """Each number dropped with the probability `share`, the others scaled up; without a key nothing is dropped."""
    if key is None or share == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - share, x.shape), x / (1 - share), 0).astype(x.dtype)


def _looped(
    step: Callable[[Array, Any], tuple[Array, Any]], x_BTM: Array, layers: tuple[Any, ...]
) -> tuple[Array, Any]:
    """`jax.lax.scan` over sequences, unrolled; None is None at every step, and None comes back for it."""
    num_layers = max(len(each) for each in layers if each is not None)
    given = [[None] * num_layers if each is None else each for each in layers]
    results: list[Any] = []
    for layer in zip(*given, strict=True):
        x_BTM, result = step(x_BTM, layer)
        results.append(result)
    return x_BTM, None if results[0] is None else results


def _split(key: Array, num_layers: int) -> tuple[Array, Array]:
    """A key for the embeddings, and one for each block."""
    own, blocks = jax.random.split(key)
    return own, jax.random.split(blocks, num_layers)


def _require_caches(caches: Caches | None, num_layers: int, *, scanned: bool) -> None:
    if caches is None:
        return
    if isinstance(caches, KVCache) != scanned:
        raise TypeError("caches must be stacked if the blocks are, and only then: see stack_layers and unstack_layers.")
    require_num_caches(caches.key.shape[0] if isinstance(caches, KVCache) else len(caches), num_layers)


def _init_norm(config: StackConfig, dtype: jax.typing.DTypeLike) -> Params:
    scale = {"scale": jnp.ones(config.d_model, dtype)}
    has_bias = config.norm == "layer" and config.bias
    return scale | {"bias": jnp.zeros(config.d_model, dtype)} if has_bias else scale
