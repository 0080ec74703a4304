"""Gated attention as a pure function of a plain pytree, for any JAX library.

Legend: B batch, T query positions, S attended positions, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tidegate._validation import require_bool, require_positions_shape
from tidegate.config import AttentionConfig, Rotary
from tidegate.flax.cache import KVCache, require_cache, update_cache
from tidegate.flax.gate import GateReads, apply_gate, gate_values, init_gate, sink_logits
from tidegate.flax.kernel import attend, log_partition
from tidegate.flax.masks import SequenceInfo, combine_masks
from tidegate.flax.params import Params, named_shapes, require_params
from tidegate.gate import Gate, GatePath
from tidegate.gates import require_layer_inputs
from tidegate.tensors.layer import METRIC_FIELDS, AttentionArrays, rms_norm

NORM_EPSILON = 1e-6


def init_attention(key: Array, config: AttentionConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Return initial parameters, a plain pytree.

    `q_proj`, `k_proj` and `v_proj` have a LeCun-normal `kernel` (M, heads, D), `o_proj` one of (H, D, M), each with an
    optional `bias`. `q_norm` and `k_norm` have a `scale` (D,), `metric` a `weight`, and `attn_gate` the parameters of
    each gate by path, as `Gate.parameter_shapes` names them.
    """
    shape = config.shape
    *keys, gate_key = jax.random.split(key, 5)
    inward = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    outward = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads, "v_proj": shape.num_kv_heads}
    params: Params = {
        name: {"kernel": inward(own, (shape.d_model, count, shape.head_dim), dtype)}
        for own, (name, count) in zip(keys, heads.items(), strict=False)
    }
    params["o_proj"] = {"kernel": outward(keys[3], (shape.num_heads, shape.head_dim, shape.d_model), dtype)}
    if config.bias:
        for projection in params.values():
            sizes = projection["kernel"].shape
            projection["bias"] = jnp.zeros(sizes[2:] if projection is params["o_proj"] else sizes[1:], dtype)
    if config.qk_norm:
        params |= {name: {"scale": jnp.ones(shape.head_dim, dtype)} for name in ("q_norm", "k_norm")}
    if config.metric is not None:
        identity = jnp.ones(shape.head_dim) if config.metric == "diagonal" else jnp.eye(shape.head_dim)
        params["metric"] = {"weight": jnp.broadcast_to(identity, (shape.num_heads, *identity.shape)).astype(dtype)}
    gate_keys = jax.random.split(gate_key, max(1, len(config.gates)))
    drawn = {
        gate.path: init_gate(own, gate, shape, dtype=dtype) for own, gate in zip(gate_keys, config.gates, strict=False)
    }
    params["attn_gate"] = {path: parameters for path, parameters in drawn.items() if parameters}
    return params


class LayerResult(NamedTuple):
    """The result of an attention layer or of a block around it."""

    output: Array
    """(B, T, M)"""
    cache: KVCache | None
    """The given cache with the new positions."""
    gates: dict[GatePath, Array]
    """Every gate's values by path: (B, T, heads, D or 1), at the dense site (B, T, M); empty without a trace."""


def gated_attention(
    params: Params,
    x: Array,
    config: AttentionConfig,
    *,
    context: Array | None = None,
    mask: Array | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    is_causal: bool | None = None,
    dropout_key: Array | None = None,
) -> Array:
    """Return attention with the gates of the configuration, (B, T, M).

    Args:
        params: From `init_attention`.
        x: (B, T, M).
        config: The layer's options; static.
        context: (B, S, M) for cross-attention, in a layer that is not causal; None attends to x.
        mask: Bool (True = attend) or additive float, broadcasting to (B, H, T, S). A fully masked row gives 0 (after
            the output projection, its bias).
        positions: (T,) or (B, T) for the rotary embedding; None counts from 0.
        segment_ids: (B, T) ids of packed documents, which never attend across.
        is_causal: Hide later positions; None uses the configuration.
        dropout_key: Key for dropout of the attention weights; None applies no dropout.
    """
    info = SequenceInfo(mask, positions, segment_ids)
    return run_attention(params, x, config, info, context=context, is_causal=is_causal, dropout_key=dropout_key).output


def attend_cached(
    params: Params,
    x: Array,
    config: AttentionConfig,
    cache: KVCache,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    is_causal: bool | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, KVCache]:
    """Return attention to the cached positions and those of x, and the updated cache.

    Other arguments are those of `gated_attention`; S of the mask is the cache's capacity, positions continue from it.
    """
    require_cache(cache)
    info = SequenceInfo(mask, positions)
    result = run_attention(params, x, config, info, cache=cache, is_causal=is_causal, dropout_key=dropout_key)
    assert result.cache is not None
    return result.output, result.cache


def trace_gates(
    params: Params,
    x: Array,
    config: AttentionConfig,
    *,
    context: Array | None = None,
    mask: Array | None = None,
    cache: KVCache | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    is_causal: bool | None = None,
) -> dict[GatePath, Array]:
    """Return every gate's values by path: (B, T, heads, D or 1), at the dense site (B, T, M), in float32 or better.

    The arguments are those of `gated_attention`, with the cache that was passed to `attend_cached`. In one `jit` with
    either function, shared computations run once.
    """
    # Callers may pass NumPy arrays.
    x, context = jnp.asarray(x), None if context is None else jnp.asarray(context)
    info = SequenceInfo(mask, positions, segment_ids)
    return run_attention(params, x, config, info, context=context, cache=cache, is_causal=is_causal, trace=True).gates


def run_attention(
    params: Params,
    x: Array,
    config: AttentionConfig,
    info: SequenceInfo,
    *,
    context: Array | None = None,
    cache: KVCache | None = None,
    is_causal: bool | None = None,
    dropout_key: Array | None = None,
    trace: bool = False,
) -> LayerResult:
    """Attend as `gated_attention` does, and with `trace` also return the gates."""
    require_bool("is_causal", is_causal, optional=True)
    is_causal = config.causal if is_causal is None else is_causal
    _require_inputs(params, x, config, info, context, cache, ordered=is_causal or config.window is not None)

    context_BSM = x if context is None else context
    q_BTHD = _project(params["q_proj"], x)
    k_BSGD, v_BSGD = _project(params["k_proj"], context_BSM), _project(params["v_proj"], context_BSM)
    reads = GateReads(input=x, context=context_BSM, query=q_BTHD, value=v_BSGD)
    q_BTHD = _apply_gate("query", q_BTHD, reads, params, config)
    k_BSGD = _apply_gate("key", k_BSGD, reads, params, config)
    v_BSGD = _apply_gate("value", v_BSGD, reads, params, config)

    start = 0 if cache is None else cache.length
    key_positions = info.positions if context is None else None
    q_BTHD = _normalize_and_rotate(q_BTHD, params.get("q_norm"), config, info.positions, start)
    k_BSGD = _normalize_and_rotate(k_BSGD, params.get("k_norm"), config, key_positions, start)
    q_BTHD = _apply_metric(params, config, q_BTHD)
    if cache is not None:
        cache = update_cache(cache, k_BSGD, v_BSGD)
        k_BSGD, v_BSGD = cache.key, cache.value
    k_BSGD, v_BSGD = k_BSGD.astype(q_BTHD.dtype), v_BSGD.astype(q_BTHD.dtype)

    scores_shape = (x.shape[0], config.num_heads, x.shape[1], k_BSGD.shape[1])
    allowed, bias = combine_masks(
        info, scores_shape, dtype=q_BTHD.dtype, cache=cache, causal=is_causal, window=config.window
    )
    limits: dict[str, Any] = {"mask": allowed, "bias": bias, "scale": config.scale, "causal": False, "window": None}
    if cache is None:
        limits |= {"causal": is_causal, "window": config.window}
    sink = config.gates.at("partition")
    is_placebo = sink is not None and sink.placebo is not None
    logits_H = None
    if sink is not None and not is_placebo:
        logits_H = sink_logits(sink, _gate_parameters(params, sink), config.num_heads)
    dropout = 0.0 if dropout_key is None else config.dropout
    o_BTHD = attend(q_BTHD, k_BSGD, v_BSGD, sink=logits_H, dropout=dropout, dropout_key=dropout_key, **limits)
    if sink is not None and (trace or is_placebo):
        # A placebo has scores of 0, so it reads the logarithm of the number of visible keys.
        query = jnp.zeros_like(q_BTHD) if is_placebo else q_BTHD
        reads = replace(reads, partition=log_partition(query, k_BSGD, **limits))
        o_BTHD = apply_gate(sink, o_BTHD, reads, {}) if is_placebo else o_BTHD
    reads = replace(reads, output=o_BTHD)

    project = functools.partial(_project_out, params["o_proj"])
    y_BTM = _apply_gate("output", o_BTHD, reads, params, config, then=project)
    y_BTM = _apply_gate("dense", y_BTM, reads, params, config)
    if cache is not None:
        # A traced length cannot be checked, so overflow gives nan.
        y_BTM = jnp.where(cache.length > cache.key.shape[1], jnp.nan, y_BTM)
    gates: dict[GatePath, Array] = {}
    if trace:
        gates = {gate.path: gate_values(gate, reads, _gate_parameters(params, gate)) for gate in config.gates}
    return LayerResult(y_BTM, cache, gates)


def attention_arrays(
    params: Mapping[str, Any], config: AttentionConfig, *, causal: bool | None = None
) -> AttentionArrays:
    """Return the layer as plain arrays; `causal` None uses the configuration."""
    require_bool("causal", causal, optional=True)
    metric = {} if config.metric is None else {METRIC_FIELDS[config.metric]: params["metric"]["weight"]}
    inward = {f"W_{name}": jnp.moveaxis(params[f"{name.lower()}_proj"]["kernel"], 1, 0) for name in "QKV"}
    biases = {f"b_{name}": params[f"{name.lower()}_proj"].get("bias") for name in "QKVO"}
    return AttentionArrays(
        **inward,
        **biases,
        W_O=params["o_proj"]["kernel"],
        gates=config.gates,
        gate_parameters={gate.path: _gate_parameters(params, gate) for gate in config.gates},
        rotary=config.rotary,
        q_norm=params["q_norm"]["scale"] if config.qk_norm else None,
        k_norm=params["k_norm"]["scale"] if config.qk_norm else None,
        norm_epsilon=NORM_EPSILON,
        temperature=config.temperature,
        causal=config.causal if causal is None else causal,
        window=config.window,
        **metric,
    )


def _require_inputs(
    params: Params,
    x: Array,
    config: AttentionConfig,
    info: SequenceInfo,
    context: Array | None,
    cache: KVCache | None,
    *,
    ordered: bool,
) -> None:
    if cache is not None:
        require_cache(cache)
    require_layer_inputs(
        config.gates,
        config.d_model,
        x=x.shape,
        context=None if context is None else context.shape,
        ordered=ordered,
        has_cache=cache is not None,
        packed=None if info.segment_ids is None else "segment_ids",
    )
    for name, array in (("x", x), ("context", context)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {array.dtype}.")
    if info.positions is not None:
        require_positions_shape(info.positions.shape, *x.shape[:2])
    require_params(params, _expected_shapes(config))


def _apply_gate(
    path: GatePath,
    target: Array,
    reads: GateReads,
    params: Params,
    config: AttentionConfig,
    *,
    then: Callable[[Array], Array] = lambda gated: gated,
) -> Array:
    """Apply the path's gate, if any, then `then`; with `recompute_gate` both are recomputed in the backward pass."""
    if (gate := config.gates.at(path)) is None:
        return then(target)

    def apply(target: Array) -> Array:
        return then(apply_gate(gate, target, reads, _gate_parameters(params, gate)))

    return (jax.checkpoint(apply) if config.recompute_gate else apply)(target)


def _gate_parameters(params: Mapping[str, Any], gate: Gate) -> Mapping[str, Array]:
    """Return the parameters of one gate; a gate without any has no entry in the tree."""
    return params["attn_gate"].get(gate.path, {})


@functools.cache
def _expected_shapes(config: AttentionConfig) -> dict[str, tuple[int, ...]]:
    return named_shapes(jax.eval_shape(lambda: init_attention(jax.random.key(0), config)))


def _project(projection: Mapping[str, Array], x: Array) -> Array:
    heads = jnp.einsum("btm,mhd->bthd", x, projection["kernel"])
    return heads + projection["bias"] if "bias" in projection else heads


def _project_out(projection: Mapping[str, Array], heads: Array) -> Array:
    y_BTM = jnp.einsum("bthd,hdm->btm", heads, projection["kernel"])
    return y_BTM + projection["bias"] if "bias" in projection else y_BTM


def _normalize_and_rotate(
    x_BTHD: Array,
    norm: Mapping[str, Array] | None,
    config: AttentionConfig,
    positions: Array | None,
    start: Array | int,
) -> Array:
    """Return normalized and rotated queries or keys; positions of None count from `start`."""
    if norm is not None:
        x_BTHD = rms_norm(x_BTHD, norm["scale"], epsilon=NORM_EPSILON)
    if config.rotary is None:
        return x_BTHD
    if positions is None:
        positions = start + jnp.arange(x_BTHD.shape[1])
    return rotate(x_BTHD, rotary_angles(positions, x_BTHD.shape[-1], config.rotary, x_BTHD.dtype))


def _apply_metric(params: Mapping[str, Any], config: AttentionConfig, q_BTHD: Array) -> Array:
    if config.metric is None:
        return q_BTHD
    weight = params["metric"]["weight"]
    if config.metric == "diagonal":
        return q_BTHD * weight
    return jnp.einsum("bthk,hmk,hml->bthl", q_BTHD, weight, weight)


def rotary_angles(positions: Array, head_dim: int, rotary: Rotary, dtype: jax.typing.DTypeLike) -> Array:
    """Return angles (T, 1, pairs) of positions (T,), or (B, T, 1, pairs) of positions (B, T), in float32 or better."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(rotary.frequencies(head_dim), dtype=wide)
    steps = (positions.astype(wide) + rotary.offset) / rotary.scale
    return (steps[..., None] * frequencies)[..., None, :]


def rotate(x_BTHD: Array, angles: Array) -> Array:
    """Rotate channels i and i + w/2 of the first w channels by the i-th angle; keep x's dtype."""
    pairs = angles.shape[-1]
    first, second, rest = jnp.split(x_BTHD, (pairs, 2 * pairs), axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=-1)
    return jnp.concatenate((turned.astype(x_BTHD.dtype), rest), axis=-1)
