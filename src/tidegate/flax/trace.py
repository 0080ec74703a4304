"""What the gates of a layer were, for one input.

Legend: B batch, T query positions, S attended positions, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from tidegate.flax.attention import AttentionConfig, Params, attention_arrays, gated_attention
from tidegate.flax.cache import KVCache
from tidegate.flax.gate import GateReads, gate_values
from tidegate.gate import Site
from tidegate.gates import Gates
from tidegate.tensors.layer import project

__all__ = ["trace_gates"]


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
    # Arrays of JAX even where those of NumPy are given, which the reference would keep to.
    x = jnp.asarray(x)
    context_BSM = x if context is None else jnp.asarray(context)
    # Through an output projection that changes nothing, and without the gates behind it, the layer is its attention.
    before = Gates(tuple(gate for gate in config.gates if gate.site not in ("output", "dense")))
    heads, width = config.shape.num_heads, config.shape.head_dim
    unchanged = {"kernel": jnp.eye(heads * width, dtype=x.dtype).reshape(heads, width, heads * width)}
    attended = gated_attention(
        params | {"o_proj": unchanged},
        x,
        replace(config, gate=before),
        context=context,
        mask=mask,
        cache=cache,
        positions=positions,
        segment_ids=segment_ids,
        is_causal=is_causal,
    )
    o_BTM = attended if cache is None else attended[0]
    arrays = attention_arrays(params, config)
    reads = GateReads(
        input=x,
        context=context_BSM,
        query=jnp.swapaxes(project(x, arrays.W_Q, arrays.b_Q), 1, 2),
        value=jnp.swapaxes(project(context_BSM, arrays.W_V, arrays.b_V), 1, 2),
        output=o_BTM.reshape(*o_BTM.shape[:2], heads, width),
    )
    return {gate.site: gate_values(gate, reads, params["attn_gate"][gate.site]) for gate in config.gates}
