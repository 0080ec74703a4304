"""Which axis of each parameter is spread over the devices of a mesh: heads, and the inner width of feed-forward layers.

A gate is partitioned like the query: the heads of a device bring their gates along.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from tidegate.config import AttentionConfig, TransformerConfig
from tidegate.flax.attention import init_attention
from tidegate.flax.decoder import init_model
from tidegate.flax.params import Params, dotted_path

_GATES = "attn_gate"
_SPLIT_AXES: dict[tuple[str, ...], int] = {
    ("q_proj", "kernel"): 1,
    ("k_proj", "kernel"): 1,
    ("v_proj", "kernel"): 1,
    ("o_proj", "kernel"): 0,
    ("q_proj", "bias"): 0,
    ("k_proj", "bias"): 0,
    ("v_proj", "bias"): 0,
    ("metric", "weight"): 0,
    ("gate_proj", "kernel"): 1,
    ("up_proj", "kernel"): 1,
    ("down_proj", "kernel"): 0,
    ("gate_proj", "bias"): 0,
    ("up_proj", "bias"): 0,
}
"""The axis that is split, by the names of a projection and its array; the others are on every device."""


def partition_specs(config: AttentionConfig | TransformerConfig, *, axis: str = "model") -> Params:
    """A `PartitionSpec` for each parameter of a layer or a model, in a pytree like theirs.

    The size of the mesh's axis must divide the numbers of query and key/value heads. What there is one of (a single
    key/value head, a gate that all heads share, a gate at the dense site) is on every device, and so are embeddings,
    norms and the head of a model.

    axis : the name of the mesh's axis
    """
    key = jax.random.key(0)
    if isinstance(config, AttentionConfig):
        return specs_for(jax.eval_shape(lambda: init_attention(key, config)), axis=axis)
    return specs_for(jax.eval_shape(lambda: init_model(key, config)), axis=axis)


def specs_for(params: Params, *, axis: str) -> Params:
    """The same for parameters, or their shapes, that are there; blocks not stacked."""

    def spec(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> PartitionSpec:
        names = dotted_path(path).split(".")
        split = 0 if _GATES in names else _SPLIT_AXES.get(tuple(names[-2:]))
        if split is None or array.shape[split] == 1:
            return PartitionSpec()
        return PartitionSpec(*(axis if place == split else None for place in range(len(array.shape))))

    return jax.tree_util.tree_map_with_path(spec, params)
