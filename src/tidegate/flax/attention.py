"""Gated attention as a pure function of a plain pytree, for any JAX library.

Legend: B batch, T query positions, S attended positions, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tidegate.flax.cache import KVCache, update_cache
from tidegate.flax.gate import GateReads, apply_gate, init_gate
from tidegate.flax.kernel import attend
from tidegate.flax.masks import cached_mask, require_mask, segment_mask
from tidegate.flax.rotary import rotary_angles, rotate
from tidegate.gate import Site
from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape
from tidegate.tensors.layer import AttentionArrays, rms_norm
from tidegate.tensors.layer_inputs import require_layer_inputs, require_layer_options, require_positions_shape
from tidegate.tensors.rotary import Rotary

__all__ = ["AttentionConfig", "Params", "attention_arrays", "gated_attention", "init_attention"]

Params: TypeAlias = dict[str, Any]
"""Nested dictionaries of arrays, a pytree."""

NORM_EPSILON = 1e-6
_METRIC_FIELDS = {"diagonal": "metric_diagonal", "learned": "metric_factor"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """The options of one attention layer, named as the PyTorch layer names them. Hashable, so static to `jit`."""

    d_model: int
    """Width of the input and of the output."""
    num_heads: int
    """Query heads."""
    gate: GateLike = "bma"
    """The layer's gates; whatever spells them is kept as `Gates`."""
    num_kv_heads: int | None = None
    """Key/value heads, dividing `num_heads`; None has as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None is `d_model / num_heads`."""
    dropout: float = 0.0
    """Share of the attention weights that is dropped in training; it builds the score matrix."""
    bias: bool = False
    """Whether the four projections have biases."""
    rope: Rotary | bool | None = None
    """A rotary embedding; True is the usual one."""
    qk_norm: bool = False
    """Whether queries and keys pass a root-mean-square norm, one scale for all heads."""
    window: int | None = None
    """Keys that a query sees, itself included; back alone if causal, else to both sides."""
    metric: Literal["diagonal", "learned"] | None = None
    """A metric per head that starts as the identity."""
    temperature: float = 1.0
    """Divides the scores."""
    recompute_gate: bool = False
    """Compute gates again in the backward pass instead of keeping what they made."""

    def __post_init__(self) -> None:
        shape = self.shape
        object.__setattr__(self, "gate", Gates.parse(self.gate))
        object.__setattr__(self, "rope", Rotary() if self.rope is True else self.rope or None)
        require_layer_options(dropout=self.dropout, window=self.window, temperature=self.temperature)
        if self.metric not in ("diagonal", "learned", None):
            raise ValueError(f"metric must be 'diagonal', 'learned' or None; got {self.metric!r}.")
        if not isinstance(self.rope, Rotary | None):
            raise TypeError(f"rope must be a Rotary, True or None; got {self.rope!r}.")
        if self.rotary is not None:
            self.rotary.width(shape.head_dim)
        for gate in self.gates:
            gate.read_width(shape)

    @property
    def gates(self) -> Gates:
        """The gates, parsed."""
        return Gates.parse(self.gate)

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding, if there is one."""
        return self.rope if isinstance(self.rope, Rotary) else None

    @property
    def shape(self) -> HeadShape:
        """The layer's sizes, the defaults filled in."""
        return HeadShape.of(
            d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.shape.head_dim**-0.5 / self.temperature


def init_attention(key: Array, config: AttentionConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Starting parameters, a plain pytree.

    `q_proj`, `k_proj` and `v_proj` have a `kernel` (M, heads, D), `o_proj` a `kernel` (H, D, M), LeCun-normal; with
    them perhaps a `bias`. `q_norm` and `k_norm` have a `scale` (D,), `metric` a `weight`, and `attn_gate` the
    parameters of each gate by site, as `Gate.parameter_shapes` names them.
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
    params["attn_gate"] = {
        gate.site: init_gate(own, gate, shape, dtype=dtype) for own, gate in zip(gate_keys, config.gates, strict=False)
    }
    return params


def gated_attention(
    params: Params,
    x: Array,
    config: AttentionConfig,
    *,
    context: Array | None = None,
    mask: Array | None = None,
    cache: KVCache | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    is_causal: bool = True,
    dropout_key: Array | None = None,
) -> Any:
    """Multi-head attention with the gates of the configuration.

    Args:
        params: as `init_attention` gives them.
        x: (B, T, M).
        config: the layer's options; static.
        context: (B, S, M) for cross-attention, with `is_causal=False`; None attends to x.
        mask: bool (True = attend) or additive float, broadcasting to (B, H, T, S); S is the cache's room if there is
            one. A row that may see nothing gives 0 (through the output projection: its bias).
        cache: continues from the positions that it holds; the result is then (output, new cache).
        positions: (T,) or (B, T) for the rotary embedding; None continues from the cache.
        segment_ids: (B, T) ids of packed documents, which never attend across.
        is_causal: whether a query sees no later position.
        dropout_key: for the dropout of the weights; None drops nothing.

    Returns:
        (B, T, M), or with a cache also the cache that holds the new positions.
    """
    require_layer_inputs(
        config.gates,
        config.d_model,
        x=x.shape,
        context=None if context is None else context.shape,
        ordered=is_causal or config.window is not None,
        has_cache=cache is not None,
        packed=None if segment_ids is None else "segment_ids",
    )
    context_BSM = x if context is None else context
    q_BTHD = _project(params["q_proj"], x)
    k_BSGD, v_BSGD = _project(params["k_proj"], context_BSM), _project(params["v_proj"], context_BSM)
    reads = GateReads(input=x, context=context_BSM, query=q_BTHD, value=v_BSGD)

    def gated(site: Site, target: Array, then: Callable[[Array], Array] = lambda gated: gated) -> Array:
        """The target under the site's gate, through a function that would keep what the gate made."""
        if (gate := config.gates.at(site)) is None:
            return then(target)

        def apply(target: Array) -> Array:
            return then(apply_gate(gate, target, reads, params["attn_gate"][site]))

        return (jax.checkpoint(apply) if config.recompute_gate else apply)(target)

    q_BTHD, k_BSGD, v_BSGD = gated("query", q_BTHD), gated("key", k_BSGD), gated("value", v_BSGD)
    start = 0 if cache is None else cache.length
    q_BTHD = _located(q_BTHD, params.get("q_norm"), config, positions, start)
    k_BSGD = _located(k_BSGD, params.get("k_norm"), config, positions if context is None else None, start)
    q_BTHD = _under_metric(params, config, q_BTHD)
    if cache is not None:
        cache = update_cache(cache, k_BSGD, v_BSGD)
        k_BSGD, v_BSGD = cache.key, cache.value
    allowed, bias = _restrictions(config, x, k_BSGD.shape[1], mask, segment_ids, cache, is_causal)
    o_BTHD = attend(
        q_BTHD,
        k_BSGD.astype(q_BTHD.dtype),
        v_BSGD.astype(q_BTHD.dtype),
        mask=allowed,
        bias=bias,
        causal=is_causal and cache is None,
        window=config.window if cache is None else None,
        scale=config.scale,
        dropout=0.0 if dropout_key is None else config.dropout,
        dropout_key=dropout_key,
    )
    reads = replace(reads, output=o_BTHD)
    y_BTM = gated("dense", gated("output", o_BTHD, then=functools.partial(_project_out, params["o_proj"])))
    if cache is None:
        return y_BTM
    # A traced length cannot be refused; what would be wrong in silence is nan instead.
    return jnp.where(cache.length > cache.key.shape[1], jnp.nan, y_BTM), cache


def attention_arrays(params: Mapping[str, Any], config: AttentionConfig, *, causal: bool = True) -> AttentionArrays:
    """The layer as plain arrays: the reference that it is tested against."""
    metric = {} if config.metric is None else {_METRIC_FIELDS[config.metric]: params["metric"]["weight"]}
    inward = {f"W_{name}": jnp.moveaxis(params[f"{name.lower()}_proj"]["kernel"], 1, 0) for name in "QKV"}
    biases = {f"b_{name}": params[f"{name.lower()}_proj"].get("bias") for name in "QKVO"}
    return AttentionArrays(
        **inward,
        **biases,
        W_O=params["o_proj"]["kernel"],
        gates=config.gates,
        gate_parameters=params["attn_gate"],
        rotary=config.rotary,
        q_norm=params["q_norm"]["scale"] if config.qk_norm else None,
        k_norm=params["k_norm"]["scale"] if config.qk_norm else None,
        norm_epsilon=NORM_EPSILON,
        temperature=config.temperature,
        causal=causal,
        window=config.window,
        **metric,
    )


def _project(projection: Mapping[str, Array], x: Array) -> Array:
    heads = jnp.einsum("btm,mhd->bthd", x, projection["kernel"])
    return heads + projection["bias"] if "bias" in projection else heads


def _project_out(projection: Mapping[str, Array], heads: Array) -> Array:
    y_BTM = jnp.einsum("bthd,hdm->btm", heads, projection["kernel"])
    return y_BTM + projection["bias"] if "bias" in projection else y_BTM


def _located(
    x_BTHD: Array,
    norm: Mapping[str, Array] | None,
    config: AttentionConfig,
    positions: Array | None,
    start: Array | int,
) -> Array:
    """Queries or keys, normalised and rotated."""
    if norm is not None:
        x_BTHD = rms_norm(x_BTHD, norm["scale"], epsilon=NORM_EPSILON)
    if config.rotary is None:
        return x_BTHD
    batch, num_positions, _, width = x_BTHD.shape
    if positions is None:
        positions = start + jnp.arange(num_positions)
    require_positions_shape(positions.shape, batch, num_positions)
    return rotate(x_BTHD, rotary_angles(positions, width, config.rotary, x_BTHD.dtype))


def _under_metric(params: Mapping[str, Any], config: AttentionConfig, q_BTHD: Array) -> Array:
    if config.metric is None:
        return q_BTHD
    weight = params["metric"]["weight"]
    if config.metric == "diagonal":
        return q_BTHD * weight
    return jnp.einsum("bthk,hmk,hml->bthl", q_BTHD, weight, weight)


def _restrictions(
    config: AttentionConfig,
    x: Array,
    num_keys: int,
    mask: Array | None,
    segment_ids: Array | None,
    cache: KVCache | None,
    is_causal: bool,
) -> tuple[Array | None, Array | None]:
    """The bool mask and the additive bias that the kernel needs beside its own causality and window."""
    batch, num_queries, _ = x.shape
    bias = None
    parts: list[Array] = []
    if mask is not None:
        mask = require_mask(mask, (batch, config.num_heads, num_queries, num_keys))
        if mask.dtype == jnp.bool_:
            parts.append(mask)
        else:
            bias = mask.astype(x.dtype)
    if segment_ids is not None:
        parts.append(segment_mask(segment_ids, batch=batch, num_positions=num_queries))
    if cache is not None:
        parts.append(cached_mask(cache, num_queries=num_queries, causal=is_causal, window=config.window))
    allowed = functools.reduce(jnp.logical_and, parts) if parts else None
    return allowed, bias
