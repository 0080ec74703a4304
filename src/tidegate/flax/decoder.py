"""A decoder language model of gated attention.

Legend: B batch, T positions, S attended positions, H heads, M model width, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from tidegate._validation import (
    require_array,
    require_known_tokens,
    require_learned_positions,
    require_positions_shape,
    require_size,
    require_tokens,
)
from tidegate.config import TransformerConfig
from tidegate.flax.block import Caches, apply_stack, init_stack, require_caches, stack_layers
from tidegate.flax.cache import KVCache, init_cache
from tidegate.flax.masks import SequenceInfo, segment_mask
from tidegate.flax.params import Params, initialize, named_shapes, require_params


def init_model(key: Array, config: TransformerConfig, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Return initial parameters of a language model, a plain pytree, as `initialize` draws them.

    `embedding` has an `embedding` (V, M), `position_embedding` one (max_length, M) if positions are learned, `stack`
    the blocks and the final norm, and `head` a `kernel` (M, V) unless embeddings are tied. With the same key, models
    with different gates share all matrices that both have.
    """
    tables: Params = {"embedding": {"embedding": jnp.zeros((config.vocab_size, config.d_model), dtype)}}
    if config.positions == "learned":
        tables["position_embedding"] = {"embedding": jnp.zeros((config.max_length, config.d_model), dtype)}
    if not config.tie_embeddings:
        tables["head"] = {"kernel": jnp.zeros((config.d_model, config.vocab_size), dtype)}
    stack = init_stack(key, config, dtype=dtype)
    return initialize(key, tables, init=config.init, num_layers=config.num_layers) | {"stack": stack}


def init_caches(
    config: TransformerConfig, *, batch: int, max_length: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> list[KVCache]:
    """Return an empty cache for each block, with room for `max_length` positions."""
    return [init_cache(config.shape, batch=batch, max_length=max_length, dtype=dtype) for _ in range(config.num_layers)]


class ModelResult(NamedTuple):
    """The result of a language model."""

    logits: Array
    """(B, T, V)"""
    caches: Caches | None
    """The given caches with the new positions."""
    gates: Any
    """The gates of each block, as in `StackResult`."""


def apply_model(
    params: Params,
    tokens: Array,
    config: TransformerConfig,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    num_logits: int | None = None,
    dropout_key: Array | None = None,
) -> Array:
    """Return for each position the logits of the next token (B, T, V).

    Args:
        params: From `init_model`; the blocks may be stacked, see `stack_layers`.
        tokens: (B, T) integers in [0, V). Others raise InputError if they are concrete and in host memory, and give NaN
            if they are traced or on another device.
        config: The model's options; static.
        mask: Bool (True = attend) or additive float, broadcasting to (B, H, T, S), in addition to causality.
        positions: (T,) or (B, T); None counts, for learned positions from 0 in each segment.
        segment_ids: (B, T) ids of packed documents, contiguous runs that never attend to each other.
        num_logits: Return the logits of only this many last positions; None returns all.
        dropout_key: Key for the dropout of the configuration; None applies no dropout.
    """
    info = SequenceInfo(mask, positions, segment_ids)
    return run_model(params, tokens, config, info, num_logits=num_logits, dropout_key=dropout_key).logits


def apply_model_cached(
    params: Params,
    tokens: Array,
    config: TransformerConfig,
    caches: Caches,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    num_logits: int | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, Caches]:
    """Return the logits of tokens that continue the cached ones, and the updated caches, first made by `init_caches`.

    Other arguments are those of `apply_model`; S of the mask is the caches' capacity, positions continue from them.
    """
    info = SequenceInfo(mask, positions)
    result = run_model(params, tokens, config, info, caches=caches, num_logits=num_logits, dropout_key=dropout_key)
    if result.caches is None:
        raise TypeError("caches must be a list of KVCache, got None. Make it with init_caches.")
    return result.logits, result.caches


def run_model(
    params: Params,
    tokens: Array,
    config: TransformerConfig,
    info: SequenceInfo,
    *,
    caches: Caches | None = None,
    num_logits: int | None = None,
    dropout_key: Array | None = None,
    trace: bool = False,
) -> ModelResult:
    """Compute `apply_model`, and with `trace` also return the gates of each block."""
    require_size("num_logits", num_logits, optional=True)
    require_array("tokens", tokens, fits=hasattr(tokens, "dtype"), kind="an array", remedy="jnp.asarray")
    require_tokens(tuple(tokens.shape), str(tokens.dtype))
    require_vocabulary(tokens, config)
    stacked = isinstance(params["stack"]["blocks"], Mapping)
    require_params(params, _expected_shapes(config, stacked=stacked))
    if caches is not None:
        require_caches(caches, config.num_layers, scanned=stacked)
    start = None
    if caches is not None:
        # It is the same in each cache.
        start = caches.length[0] if isinstance(caches, KVCache) else caches[0].length
    info = info._replace(positions=_positions(tokens, config, info, start=start))
    x_BTM = _look_up(params["embedding"]["embedding"], tokens)
    if "position_embedding" in params:
        assert info.positions is not None
        x_BTM = x_BTM + _look_up(params["position_embedding"]["embedding"], info.positions)
    x_BTM, new_caches, gates = apply_stack(
        params["stack"], x_BTM, config, info, caches=caches, dropout_key=dropout_key, trace=trace
    )
    x_BTM = x_BTM if num_logits is None else x_BTM[:, -num_logits:]
    # Models with tied embeddings have no head.
    if "head" in params:
        logits_BTV = x_BTM @ params["head"]["kernel"]
    else:
        logits_BTV = jnp.einsum("btm,vm->btv", x_BTM, params["embedding"]["embedding"])
    return ModelResult(logits_BTV, new_caches, gates)


def require_vocabulary(tokens: Array, config: TransformerConfig, *, name: str = "tokens", wait: bool = False) -> None:
    """Raise InputError for concrete tokens outside the vocabulary; read those on an accelerator only if `wait`."""
    if isinstance(tokens, Tracer) or tokens.size == 0:
        return
    if isinstance(tokens, Array):
        on_cpu = all(device.platform == "cpu" for device in tokens.devices())
        if not (tokens.is_fully_addressable and (on_cpu or wait)):
            return
    values = jax.device_get(tokens)
    require_known_tokens(int(values.min()), int(values.max()), config.vocab_size, name=name)


def _positions(tokens: Array, config: TransformerConfig, info: SequenceInfo, *, start: Array | None) -> Array | None:
    """Return the given positions, or count learned ones from `start` or within each segment; else None.

    Learned positions end with their table: beyond it, a traced start or a long segment gives NaN. None leaves counting
    to the attention layers.
    """
    batch, num_positions = tokens.shape
    if info.positions is not None:
        require_positions_shape(tuple(info.positions.shape), batch, num_positions)
        return info.positions
    if config.positions != "learned":
        return None
    if info.segment_ids is None:
        start = jnp.zeros((), jnp.int32) if start is None else start
        known = 0 if isinstance(start, Tracer) else int(start)
        require_learned_positions(known + num_positions, config.max_length)
        return start + jnp.arange(num_positions)
    # Positions restart in each segment, so a row may be longer than the table.
    together_BTT = segment_mask(info.segment_ids, batch=batch, num_positions=num_positions)[:, 0]
    return jnp.sum(jnp.tril(together_BTT, -1), axis=-1)


def _look_up(table: Array, indices: Array) -> Array:
    """Return rows of the table, NaN for an index out of range or below 0."""
    return jnp.asarray(table).at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@functools.cache
def _expected_shapes(config: TransformerConfig, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    def draw() -> Params:
        params = init_model(jax.random.key(0), config)
        stack = params["stack"]
        return params | {"stack": stack | {"blocks": stack_layers(stack["blocks"])}} if stacked else params

    return named_shapes(jax.eval_shape(draw))
