"""What the gates of a layer were, for one input.

Legend: B batch, T query positions, S attended positions, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tidegate.flax.attention import Params, attended_reads
from tidegate.flax.attention_config import AttentionConfig
from tidegate.flax.cache import KVCache
from tidegate.flax.gate import gate_values
from tidegate.gate import Site


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
    is_causal: bool = True,
) -> dict[Site, Array]:
    """Every gate's values by site: (B, T, heads, D or 1), at the dense site (B, T, M), in float32 or better.

    The arguments are those of `gated_attention`; the cache is the one that it was given. Compiled together with it,
    what both compute is computed once.
    """
    reads, _ = attended_reads(
        params,
        # Arrays of JAX even where those of NumPy are given.
        jnp.asarray(x),
        config,
        context=None if context is None else jnp.asarray(context),
        mask=mask,
        cache=cache,
        positions=positions,
        segment_ids=segment_ids,
        is_causal=is_causal,
        dropout_key=None,
    )
    return {gate.site: gate_values(gate, reads, params["attn_gate"][gate.site]) for gate in config.gates}
