"""Gated attention as an NNX module, over the functions of `attention`.

Legend: B batch, T query positions, S attended positions, M model width, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tidegate._validation import InputError, require_bool, require_sizes
from tidegate.config import AttentionConfig, MetricKind, Rotary
from tidegate.flax.attention import attention_arrays, init_attention, run_attention
from tidegate.flax.cache import KVCache, init_cache
from tidegate.flax.masks import SequenceInfo
from tidegate.flax.params import Params, cast_params
from tidegate.flax.variables import SwitchedModule, as_variables, check_or_draw, plain_params
from tidegate.gate import GatePath
from tidegate.gates import GateLike
from tidegate.tensors.layer import AttentionArrays


class GatedAttention(SwitchedModule):
    """Multi-head attention with any gates of the vocabulary, built and called like `nnx.MultiHeadAttention`.

    It differs in three ways: keys and values come from one input, the output is as wide as the input, and a mask must
    be bool, since nnx reads a floating one as 0 and 1 and other libraries add it to the scores.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        *,
        gate: GateLike = "bma",
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        use_bias: bool = True,
        decode: bool | None = None,
        normalize_qk: bool = False,
        params: Params | None = None,
        mesh_axis: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        num_kv_heads: int | None = None,
        rope: Rotary | bool | None = None,
        window: int | None = None,
        metric: MetricKind | None = None,
        temperature: float = 1.0,
        recompute_gate: bool = False,
    ) -> None:
        """Build the layer, with the names and defaults of `nnx.MultiHeadAttention` where it has them.

        Args:
            num_heads: Query heads.
            in_features: Width of the input and of the output, `d_model`.
            qkv_features: Width of all heads together; None is `in_features`.
            gate: A spelling such as `"bma"` or `"g1+g2"`, a `Gate`, or several; `"none"` is plain attention.
            dtype: Dtype of the computation; None infers it from input and parameters. Gate logits are at least float32.
            param_dtype: Dtype of the initial parameters.
            dropout_rate: Dropout of the attention weights, unless deterministic.
            deterministic: Turn dropout off; the call may override it.
            use_bias: Give the four projections biases.
            decode: Use the cache; the call may override it.
            normalize_qk: Apply an RMS norm to queries and keys, `qk_norm`.
            params: From `init_attention`; None draws them.
            mesh_axis: Mesh axis that heads are sharded over, gates like queries; needs a mesh (`jax.set_mesh`).
            rngs: Keys for the parameters and for dropout.
            keep_rngs: Keep a stream of keys for dropout.
            num_kv_heads: As in `AttentionConfig`, and so are the rest.
            rope: Rotary embedding.
            window: Sliding window.
            metric: Metric of the scores.
            temperature: Temperature of the softmax.
            recompute_gate: Recompute gates in the backward pass.
        """
        require_bool("use_bias", use_bias)
        require_bool("normalize_qk", normalize_qk)
        width, name = (in_features, "in_features") if qkv_features is None else (qkv_features, "qkv_features")
        require_sizes(num_heads=num_heads, **{name: width})
        if width % num_heads:
            raise InputError(name, expected=f"a multiple of num_heads={num_heads}", got=width)
        super().__init__(
            dtype=dtype,
            deterministic=deterministic,
            decode=decode,
            dropout=dropout_rate,
            rngs=rngs,
            keep_rngs=keep_rngs,
        )
        self.config = config = AttentionConfig(
            d_model=in_features,
            num_heads=num_heads,
            head_dim=width // num_heads,
            gate=gate,
            causal=False,
            dropout=dropout_rate,
            bias=use_bias,
            qk_norm=normalize_qk,
            num_kv_heads=num_kv_heads,
            rope=rope,
            window=window,
            metric=metric,
            temperature=temperature,
            recompute_gate=recompute_gate,
        )
        key = rngs.params()
        params = check_or_draw(params, lambda: init_attention(key, config, dtype=param_dtype))
        self.param_dtype = params["q_proj"]["kernel"].dtype
        for part, variables in as_variables(params, axis=mesh_axis).items():
            setattr(self, part, variables)
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)

    @classmethod
    def from_config(
        cls,
        config: AttentionConfig,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        deterministic: bool | None = None,
        decode: bool | None = None,
        params: Params | None = None,
        mesh_axis: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> Self:
        """Build the layer that a configuration describes; the other arguments are those of the constructor.

        Causality is an argument of the call, as in `nnx.MultiHeadAttention`, and not taken from the configuration.
        """
        layer = cls(
            config.num_heads,
            config.d_model,
            config.num_heads * config.shape.head_dim,
            gate=config.gate,
            dropout_rate=config.dropout,
            use_bias=config.bias,
            normalize_qk=config.qk_norm,
            num_kv_heads=config.num_kv_heads,
            rope=config.rope,
            window=config.window,
            metric=config.metric,
            temperature=config.temperature,
            recompute_gate=config.recompute_gate,
            dtype=dtype,
            param_dtype=param_dtype,
            deterministic=deterministic,
            decode=decode,
            params=params,
            mesh_axis=mesh_axis,
            rngs=rngs,
            keep_rngs=keep_rngs,
        )
        layer.config = config
        return layer

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        sow_gates: bool = False,
    ) -> Array:
        """Return attention (B, T, M).

        Args:
            inputs_q: (B, T, M)
            inputs_k: (B, S, M) for cross-attention; None, or the same array, attends to `inputs_q`.
            inputs_v: None, or the same array as `inputs_k`.
            mask: Bool, True = attend, broadcasting to (B, H, T, S); S is the cache's capacity in decoding.
            positions: (T,) or (B, T) for the rotary embedding; None counts from the cache.
            segment_ids: (B, T) ids of packed documents, which never attend across.
            deterministic: Turn dropout off; None uses the module's setting.
            rngs: Keys for dropout; None uses the module's own.
            decode: Continue causally from the cache and update it; None uses the module's setting.
            is_causal: Hide later positions; decoding always hides them.
            sow_gates: Sow each gate's values as an `nnx.Intermediate`, `<site>_gate`.
        """
        require_bool("is_causal", is_causal)
        require_bool("sow_gates", sow_gates)
        if inputs_v is not None and inputs_v is not inputs_k:
            hint = "Keys, values and their gates read one context; leave inputs_v out."
            raise InputError("inputs_v", expected="None or the same array as inputs_k", hint=hint)
        context = None if inputs_k is inputs_q else inputs_k
        require_bool_mask(mask)
        cache = self.held_cache() if self.decodes(decode) else None
        result = run_attention(
            cast_params(plain_params(self), self.dtype),
            self.in_dtype(inputs_q),
            self.config,
            SequenceInfo(mask, positions, segment_ids),
            context=None if context is None else self.in_dtype(context),
            cache=cache,
            is_causal=is_causal or cache is not None,
            dropout_key=self.dropout_key(self.config.dropout, deterministic, rngs),
            trace=sow_gates,
        )
        self.keep(result.cache, result.gates)
        return result.output

    def arrays(self, *, is_causal: bool = True) -> AttentionArrays:
        """Return the layer as plain arrays, for `tidegate.experts` and `tidegate.geometry`."""
        return attention_arrays(plain_params(self), self.config, causal=is_causal)

    def init_cache(self, input_shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None = None) -> None:
        """Create an empty cache; `input_shape` is (batch, capacity, M), dtype None is that of the computation."""
        batch, max_length, _ = input_shape
        wanted = self.dtype if dtype is None else dtype
        wanted = self.param_dtype if wanted is None else wanted
        cache = init_cache(self.config.shape, batch=batch, max_length=max_length, dtype=wanted)
        self.cached_key, self.cached_value = nnx.Cache(cache.key), nnx.Cache(cache.value)
        self.cache_index = nnx.Cache(cache.length)

    def held_cache(self) -> KVCache:
        """Return the cache as the functions take it."""
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise InputError("decode", expected="False without a cache", got=True, hint="Call init_cache first.")
        return KVCache(key=self.cached_key[...], value=self.cached_value[...], length=self.cache_index[...])

    def keep(self, cache: KVCache | None, gates: Mapping[GatePath, Array]) -> None:
        """Store the new cache of a call, if any, and sow its gates as intermediates."""
        for site, values in gates.items():
            self.sow(nnx.Intermediate, f"{site}_gate", values)
        if cache is None:
            return
        variables = (self.cached_key, self.cached_value, self.cache_index)
        for variable, array in zip(variables, cache, strict=True):
            assert variable is not None
            variable[...] = array


def require_bool_mask(mask: Array | None) -> None:
    """Raise TypeError for a mask that is not bool: a floating one would be 0 and 1 there, added to scores elsewhere."""
    kind = getattr(mask, "dtype", type(mask).__name__)
    if mask is not None and kind != jnp.bool_:
        raise TypeError(
            f"mask must be a bool array, True where a query may attend, got {kind}. "
            "Make it with dtype=bool, or compare it, as in mask != 0."
        )
