"""Transformer blocks and language models as NNX modules, over the functions of `block` and `decoder`.

Legend: B batch, T positions, S attended positions, M model width, H query heads, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tidegate._validation import require_bool
from tidegate.config import StackConfig, TransformerConfig
from tidegate.flax.block import init_block, run_block
from tidegate.flax.decoder import init_model, run_model
from tidegate.flax.generate import generate
from tidegate.flax.masks import SequenceInfo
from tidegate.flax.modules import GatedAttention, require_bool_mask
from tidegate.flax.params import Params, cast_params
from tidegate.flax.variables import SwitchedModule, as_variables, check_or_draw, plain_params


class TransformerBlock(SwitchedModule):
    """A transformer block: x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(
        self,
        config: StackConfig,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        deterministic: bool | None = None,
        decode: bool | None = None,
        params: Params | None = None,
        mesh_axis: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> None:
        """Build the block; `params` are those of `init_block`, the rest is as in `GatedAttention`."""
        shared: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "decode": decode}
        shared |= {"rngs": rngs, "keep_rngs": keep_rngs}
        super().__init__(dropout=_largest_dropout(config), **shared)
        self.config = config
        key = rngs.params()
        params = check_or_draw(params, lambda: init_block(key, config, dtype=param_dtype))
        self.attention_norm = as_variables(params["attention_norm"], axis=mesh_axis)
        self.attention = GatedAttention.from_config(
            config.attention, params=params["attention"], mesh_axis=mesh_axis, **shared
        )
        self.feedforward_norm = as_variables(params["feedforward_norm"], axis=mesh_axis)
        self.feedforward = as_variables(params["feedforward"], axis=mesh_axis)

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        sow_gates: bool = False,
    ) -> Array:
        """Return the stream after this block (B, T, M); the options are those of `GatedAttention`."""
        require_bool_mask(mask)
        require_bool("sow_gates", sow_gates)
        result = run_block(
            cast_params(plain_params(self), self.dtype),
            self.in_dtype(x),
            self.config,
            SequenceInfo(mask, positions, segment_ids),
            cache=self.attention.held_cache() if self.decodes(decode) else None,
            dropout_key=self.dropout_key(_largest_dropout(self.config), deterministic, rngs),
            trace=sow_gates,
        )
        self.attention.keep(result.cache, result.gates)
        return result.output


class TransformerLM(SwitchedModule):
    """A decoder language model, from tokens to the logits of the next token at each position."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        deterministic: bool | None = None,
        decode: bool | None = None,
        params: Params | None = None,
        mesh_axis: str | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> None:
        """Build the model; `params` are those of `init_model` or `load_params`, the rest is as in `GatedAttention`."""
        shared: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "decode": decode}
        shared |= {"rngs": rngs, "keep_rngs": keep_rngs}
        super().__init__(dropout=_largest_dropout(config), **shared)
        self.config = config
        key = rngs.params()
        params = check_or_draw(params, lambda: init_model(key, config, dtype=param_dtype))
        blocks = [
            TransformerBlock(config.block(index), params=block, mesh_axis=mesh_axis, **shared)
            for index, block in enumerate(params["stack"]["blocks"])
        ]
        for table in ("embedding", "position_embedding", "head"):
            if table in params:
                setattr(self, table, as_variables(params[table], axis=mesh_axis))
        norm = as_variables(params["stack"]["norm"], axis=mesh_axis)
        self.stack = nnx.Dict[Any]({"blocks": nnx.List(blocks), "norm": norm})

    def __call__(
        self,
        tokens: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        num_logits: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        sow_gates: bool = False,
    ) -> Array:
        """Return the logits (B, T, V).

        The first five arguments are those of `apply_model`, but a mask must be bool. The switches are those of
        `GatedAttention`: `decode` continues from the caches and updates them, `sow_gates` sows each layer's gates.
        """
        require_bool_mask(mask)
        require_bool("sow_gates", sow_gates)
        layers = [block.attention for block in self.stack["blocks"]]
        result = run_model(
            cast_params(plain_params(self), self.dtype),
            tokens,
            self.config,
            SequenceInfo(mask, positions, segment_ids),
            caches=[layer.held_cache() for layer in layers] if self.decodes(decode) else None,
            num_logits=num_logits,
            dropout_key=self.dropout_key(_largest_dropout(self.config), deterministic, rngs),
            trace=sow_gates,
        )
        caches = [None] * len(layers) if result.caches is None else result.caches
        for layer, cache, gates in zip(layers, caches, result.gates, strict=True):
            layer.keep(cache, gates)
        return result.logits

    def init_cache(self, input_shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None = None) -> None:
        """Create an empty cache for each block; `input_shape` is (batch, capacity), dtype None the computation's."""
        for block in self.stack["blocks"]:
            block.attention.init_cache((*input_shape, self.config.d_model), dtype)

    def generate(
        self,
        prompt: Array,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        key: Array | None = None,
        prompt_mask: Array | None = None,
        pad_token: int = 0,
    ) -> Array:
        """Continue the prompts (B, T); see `tidegate.flax.generate`. Dropout is off, and the caches stay unchanged."""
        return generate(
            cast_params(plain_params(self), self.dtype),
            prompt,
            self.config,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_tokens=stop_tokens,
            key=key,
            prompt_mask=prompt_mask,
            pad_token=pad_token,
        )


def _largest_dropout(config: StackConfig) -> float:
    return max(config.dropout, config.attention_dropout)
