"""Gated attention in JAX: pure functions first, then Flax NNX modules over them."""

from tidegate.flax.attention import AttentionConfig, attention_arrays, gated_attention, init_attention
from tidegate.flax.cache import KVCache, init_cache

__all__ = ["AttentionConfig", "KVCache", "attention_arrays", "gated_attention", "init_attention", "init_cache"]
