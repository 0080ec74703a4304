"""Gated attention in JAX: pure functions first, then Flax NNX modules over them."""

from tidegate.config import AttentionConfig, Rotary, TransformerConfig
from tidegate.flax.attention import attend_cached, attention_arrays, gated_attention, init_attention, trace_gates
from tidegate.flax.block import apply_block, apply_block_cached, init_block, stack_layers, unstack_layers
from tidegate.flax.cache import KVCache, init_cache
from tidegate.flax.decoder import apply_model, apply_model_cached, init_caches, init_model
from tidegate.flax.generate import generate
from tidegate.flax.models import TransformerBlock, TransformerLM
from tidegate.flax.modules import GatedAttention
from tidegate.flax.params import cast_params
from tidegate.flax.variables import partition_specs, plain_params
from tidegate.flax.weights import from_torch, load_params, save_params, to_torch

__all__ = [
    "AttentionConfig",
    "GatedAttention",
    "KVCache",
    "Rotary",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLM",
    "apply_block",
    "apply_block_cached",
    "apply_model",
    "apply_model_cached",
    "attend_cached",
    "attention_arrays",
    "cast_params",
    "from_torch",
    "gated_attention",
    "generate",
    "init_attention",
    "init_block",
    "init_cache",
    "init_caches",
    "init_model",
    "load_params",
    "partition_specs",
    "plain_params",
    "save_params",
    "stack_layers",
    "to_torch",
    "trace_gates",
    "unstack_layers",
]
