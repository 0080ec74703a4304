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

from tidegate._refusals import require_num_logits
from tidegate.config import StackConfig, TransformerConfig
from tidegate.flax.attention import Params
from tidegate.flax.block import apply_norm, attention_config, drop, init_block, residual_block
from tidegate.flax.decoder import embed, init_model, place, project_logits
from tidegate.flax.generate import generate
from tidegate.flax.modules import GatedAttention
from tidegate.flax.precision import cast_params
from tidegate.flax.variables import SwitchedModule, as_variables, given_or_drawn, plain_params


class TransformerBlock(SwitchedModule):
    """x + attention(norm(x)), and of that x + feedforward(norm(x))."""

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
        stream = rngs.dropout.fork() if keep_rngs and config.dropout > 0 else None
        super().__init__(dtype=dtype, deterministic=deterministic, decode=decode, stream=stream)
        self.config = config
        key = rngs.params()
        params = given_or_drawn(params, lambda: init_block(key, config, dtype=param_dtype))
        self.attention_norm = as_variables(params["attention_norm"], axis=mesh_axis)
        self.attention = GatedAttention.from_config(
            attention_config(config),
            dtype=dtype,
            deterministic=deterministic,
            decode=decode,
            params=params["attention"],
            mesh_axis=mesh_axis,
            rngs=rngs,
            keep_rngs=keep_rngs,
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
        """The stream after this block (B, T, M); the options are those of `GatedAttention`."""
        own = {
            name: plain_params(getattr(self, name)) for name in ("attention_norm", "feedforward_norm", "feedforward")
        }
        own, x = cast_params(own, self.dtype), self.in_dtype(x)
        attended = self.attention(
            apply_norm(own["attention_norm"], x, self.config.norm),
            mask=mask,
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
            rngs=rngs,
            decode=self.decodes(decode),
            is_causal=self.config.causal,
            sow_gates=sow_gates,
        )
        key = self.dropout_key(self.config.dropout, deterministic, rngs)
        return residual_block(own, x, attended, self.config, dropout_key=key)


class TransformerLM(SwitchedModule):
    """Tokens in, for each position the logits of the next token out."""

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
        stream = rngs.dropout.fork() if keep_rngs and config.dropout > 0 else None
        super().__init__(dtype=dtype, deterministic=deterministic, decode=decode, stream=stream)
        self.config = config
        key = rngs.params()
        params = given_or_drawn(params, lambda: init_model(key, config, dtype=param_dtype))
        blocks = [
            TransformerBlock(
                config.block(index),
                dtype=dtype,
                deterministic=deterministic,
                decode=decode,
                params=block,
                mesh_axis=mesh_axis,
                rngs=rngs,
                keep_rngs=keep_rngs,
            )
            for index, block in enumerate(params["stack"]["blocks"])
        ]
        for table in _TABLES:
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
        """Logits (B, T, V).

        Args:
            tokens: (B, T) integers below the vocabulary's size; beyond it lies NaN.
            mask: bool, True = attend, broadcasting to (B, H, T, S), beside causality; S is the room of a cache.
            positions: (T,) or (B, T); None counts, on from the cache, learned ones anew in each segment.
            segment_ids: (B, T) ids of packed documents, each a run of positions. No document sees another.
            num_logits: give the logits of that many last positions alone; None gives all.
            deterministic: whether nothing is dropped; None asks the modules.
            rngs: keys for dropout; None takes the modules' own.
            decode: whether to continue from the caches, and put the new positions there; None asks the module.
            sow_gates: whether every attention layer sows its gates; see `GatedAttention`.
        """
        require_num_logits(num_logits)
        decode = self.decodes(decode)
        start = self.stack["blocks"][0].attention.cache_length() if decode else None
        positions = place(tokens, self.config, positions=positions, segment_ids=segment_ids, start=start)
        own = {name: plain_params(getattr(self, name)) for name in _TABLES if hasattr(self, name)}
        own = cast_params(own | {"norm": plain_params(self.stack["norm"])}, self.dtype)

        def run(block: TransformerBlock, x_BTM: Array, rngs: nnx.Rngs | nnx.RngStream | None) -> Array:
            return block(
                x_BTM,
                mask=mask,
                positions=positions,
                segment_ids=segment_ids,
                deterministic=deterministic,
                rngs=rngs,
                decode=decode,
                sow_gates=sow_gates,
            )

        if self.config.checkpoint_blocks and not decode and not sow_gates:
            run = nnx.remat(run)
        key = self.dropout_key(self.config.dropout, deterministic, rngs)
        x_BTM = drop(embed(own, tokens, positions), self.config.dropout, key)
        for block in self.stack["blocks"]:
            x_BTM = run(block, x_BTM, rngs)
        x_BTM = apply_norm(own["norm"], x_BTM, self.config.norm)
        return project_logits(own, x_BTM if num_logits is None else x_BTM[:, -num_logits:])

    def init_cache(self, input_shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None = None) -> None:
        """An empty cache for each block.

        input_shape : (batch, positions that there is to be room for)
        dtype       : None is that of the computation
        """
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
        """Continue the prompts (B, T); see `tidegate.flax.generate`. Nothing is dropped, and the caches stay."""
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


_TABLES = ("embedding", "position_embedding", "head")
