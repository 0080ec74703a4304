"""Transformer blocks and stacks of blocks.

Legend: B batch, T positions, M model width, F inner width of the feed-forward layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._validation import require_num_caches
from tidegate.config import NormKind, StackConfig
from tidegate.flax.attention import LayerResult, init_attention, run_attention
from tidegate.flax.cache import KVCache, require_cache
from tidegate.flax.gate import widen
from tidegate.flax.masks import SequenceInfo
from tidegate.flax.params import Params, initialize
from tidegate.gate import GatePath
from tidegate.tensors.layer import rms_norm

Caches: TypeAlias = Sequence[KVCache] | KVCache
"""A cache for each block, or for stacked blocks one whose arrays have a first axis of layers."""

_EPSILON = {"rms": 1e-6, "layer": 1e-5}


def init_block(key: Array, config: StackConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Return initial parameters of a block, as `initialize` draws them.

    They are `attention` (see `init_attention`); `feedforward`, with `kernel` (M, F) of `up_proj` and, for swiglu,
    `gate_proj`, (F, M) of `down_proj`; and two norms with a `scale` (M,) and, for layer norms with biases, a `bias`.
    """
    d_model, d_ff = config.d_model, config.feedforward_width
    sizes = {"up_proj": (d_model, d_ff), "down_proj": (d_ff, d_model)}
    if config.feedforward == "swiglu":
        sizes["gate_proj"] = (d_model, d_ff)
    # `initialize` draws the kernels.
    feedforward = {name: {"kernel": jnp.zeros(size, dtype)} for name, size in sizes.items()}
    if config.bias:
        for name, (_, width) in sizes.items():
            feedforward[name]["bias"] = jnp.zeros(width, dtype)
    params: Params = {
        "attention_norm": _init_norm(config, dtype),
        "attention": init_attention(key, config.attention, dtype=dtype),
        "feedforward_norm": _init_norm(config, dtype),
        "feedforward": feedforward,
    }
    return initialize(key, params, init=config.init, num_layers=config.num_layers)


def apply_block(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    dropout_key: Array | None = None,
) -> Array:
    """Return the residual stream after this block (B, T, M).

    The options are those of `gated_attention`; the key serves dropout of the weights and of both branches.
    """
    info = SequenceInfo(mask, positions, segment_ids)
    return run_block(params, x_BTM, config, info, dropout_key=dropout_key).output


def apply_block_cached(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    cache: KVCache,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, KVCache]:
    """Return the residual stream after this block, continued from a cache, and the cache; see `attend_cached`."""
    require_cache(cache)
    info = SequenceInfo(mask, positions)
    result = run_block(params, x_BTM, config, info, cache=cache, dropout_key=dropout_key)
    assert result.cache is not None
    return result.output, result.cache


def run_block(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    info: SequenceInfo,
    *,
    cache: KVCache | None = None,
    dropout_key: Array | None = None,
    trace: bool = False,
) -> LayerResult:
    """Compute x + attention(norm(x)), and of that x + feedforward(norm(x)); with `trace` also return the gates."""
    weights_key = attended_key = fed_key = None
    if dropout_key is not None:
        weights_key, branches_key = jax.random.split(dropout_key)
        attended_key, fed_key = jax.random.split(branches_key)
    normed = apply_norm(params["attention_norm"], x_BTM, config.norm)
    attended = run_attention(
        params["attention"], normed, config.attention, info, cache=cache, dropout_key=weights_key, trace=trace
    )
    x_BTM = x_BTM + drop(attended.output, config.dropout, attended_key)
    y_BTM = apply_feedforward(params["feedforward"], apply_norm(params["feedforward_norm"], x_BTM, config.norm))
    return attended._replace(output=x_BTM + drop(y_BTM, config.dropout, fed_key))


def init_stack(key: Array, config: StackConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Return initial parameters: `blocks`, a list, and the final `norm`."""
    keys = [jax.random.fold_in(key, index) for index in range(config.num_layers)]
    blocks = [init_block(key, config.block(index), dtype=dtype) for index, key in enumerate(keys)]
    return {"blocks": blocks, "norm": _init_norm(config, dtype)}


class StackResult(NamedTuple):
    """The result of a stack of blocks."""

    output: Array
    """(B, T, M), after the last norm."""
    caches: Caches | None
    """The given caches with the new positions."""
    gates: Any
    """The gates of each block, as in `LayerResult`; for stacked blocks with a leading axis of layers."""


def apply_stack(
    params: Params,
    x_BTM: Array,
    config: StackConfig,
    info: SequenceInfo,
    *,
    caches: Caches | None = None,
    dropout_key: Array | None = None,
    trace: bool = False,
) -> StackResult:
    """Pass the embeddings (B, T, M) through all blocks and the norm; blocks of `stack_layers` under `jax.lax.scan`."""
    blocks = params["blocks"]
    scanned = isinstance(blocks, Mapping)
    num_layers = jax.tree.leaves(blocks)[0].shape[0] if scanned else len(blocks)

    def step(x_BTM: Array, layer: Any) -> tuple[Array, tuple[KVCache | None, dict[GatePath, Array]]]:
        block, cache, key = layer
        result = run_block(block, x_BTM, config, info, cache=cache, dropout_key=key, trace=trace)
        return result.output, (result.cache, result.gates)

    # With caches nothing is trained, and only a cache of known length can raise an error on overflow.
    if config.checkpoint_blocks and caches is None:
        # A scan already prevents common-subexpression elimination.
        step = jax.checkpoint(step, prevent_cse=not scanned)
    keys = None
    if dropout_key is not None:
        own_key, blocks_key = jax.random.split(dropout_key)
        keys = jax.random.split(blocks_key, num_layers)
        x_BTM = drop(x_BTM, config.dropout, own_key)
    run = jax.lax.scan if scanned else _loop
    x_BTM, (caches, gates) = run(step, x_BTM, (blocks, caches, keys))
    return StackResult(apply_norm(params["norm"], x_BTM, config.norm), caches, gates)


def stack_layers(layers: Sequence[Any]) -> Any:
    """Stack pytrees of one structure, such as blocks or their caches, along a new leading axis of layers."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """Undo `stack_layers`."""
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(operator.itemgetter(layer), stacked) for layer in range(num_layers)]


def apply_feedforward(params: Params, x_BTM: Array) -> Array:
    """Return (silu(x W_gate) ⊙ x W_up) W_down, or without a `gate_proj` gelu(x W_up) W_down with the exact gelu."""
    up_BTF = _project(params["up_proj"], x_BTM)
    if "gate_proj" in params:
        inner_BTF = jax.nn.silu(_project(params["gate_proj"], x_BTM)) * up_BTF
    else:
        inner_BTF = jax.nn.gelu(up_BTF, approximate=False)
    return _project(params["down_proj"], inner_BTF)


def _project(projection: Mapping[str, Array], x: Array) -> Array:
    y = x @ projection["kernel"]
    return y + projection["bias"] if "bias" in projection else y


def apply_norm(params: Params, x: Array, kind: NormKind) -> Array:
    """Return the RMS or layer norm over the last axis, computed in float32 or better, in x's dtype."""
    if kind == "rms":
        return rms_norm(x, params["scale"], epsilon=_EPSILON[kind])
    centered = widen(x) - jnp.mean(widen(x), axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + _EPSILON[kind])
    scaled = normed.astype(x.dtype) * params["scale"]
    return scaled + params["bias"] if "bias" in params else scaled


def drop(x: Array, rate: float, key: Array | None) -> Array:
    """Apply dropout with probability `rate` to x; without a key return x."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def _loop(step: Callable[[Array, Any], Any], x_BTM: Array, layers: tuple[Any, ...]) -> Any:
    """Run `step` over sequences like an unrolled `lax.scan`; a None input stays None."""
    num_layers = len(layers[0])
    results: list[Any] = []
    for layer in zip(*([None] * num_layers if each is None else each for each in layers), strict=True):
        x_BTM, result = step(x_BTM, layer)
        results.append(result)
    caches, gates = map(list, zip(*results, strict=True))
    return x_BTM, (None if layers[1] is None else caches, gates)


def require_caches(caches: Caches, num_layers: int, *, scanned: bool) -> None:
    """Raise an error unless there is a cache for each block, stacked if the blocks are."""
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list of KVCache, got {type(caches).__name__}. Make it with init_caches.")
    if isinstance(caches, KVCache) != scanned:
        raise TypeError("caches must be stacked if the blocks are, and only then: see stack_layers and unstack_layers.")
    require_num_caches(caches.key.shape[0] if isinstance(caches, KVCache) else len(caches), num_layers)


def _init_norm(config: StackConfig, dtype: jax.typing.DTypeLike) -> Params:
    scale = {"scale": jnp.ones(config.d_model, dtype)}
    has_bias = config.norm == "layer" and config.bias
    return scale | {"bias": jnp.zeros(config.d_model, dtype)} if has_bias else scale
