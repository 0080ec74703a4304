"""Convert checkpoints of other attention layers to state dicts of `GatedAttention`, and back.

Each conversion returns new tensors, and raises InputError if tensors are missing or unexpected, or have inconsistent
shapes.

Legend: M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from tidegate._validation import InputError, require_choice
from tidegate.config import AttentionConfig, Rotary
from tidegate.gate import PRESETS
from tidegate.sizes import HeadShape
from tidegate.torch.precision import widen

__all__ = [
    "from_fused_query_gate",
    "from_gpt_oss",
    "from_stacked_qkv",
    "gpt_oss_layer",
    "to_fused_query_gate",
    "to_gpt_oss",
]

_Layout: TypeAlias = dict[str, tuple[str, ...]]
"""The tensors of a state dict: the axes of each by name. An axis is a product, such as 2HD."""

_BESIDE_QUERY: _Layout = {
    "k_proj.weight": ("GD", "M"),
    "v_proj.weight": ("GD", "M"),
    "o_proj.weight": ("M", "HD"),
    "q_norm.weight": ("D",),
    "k_norm.weight": ("D",),
}
"""The tensors that do not change, except for the norms, when query and gate are fused or split."""
_BESIDE_QUERY_BIASES: _Layout = {"k_proj.bias": ("GD",), "v_proj.bias": ("GD",), "o_proj.bias": ("M",)}

_FUSED: _Layout = {**_BESIDE_QUERY, "q_proj.weight": ("2HD", "M")}
_FUSED_BIASES: _Layout = {**_BESIDE_QUERY_BIASES, "q_proj.bias": ("2HD",)}

_OWN: _Layout = {**_BESIDE_QUERY, "q_proj.weight": ("HD", "M"), "attn_gate.output.weight": ("H", "M", "D")}
_OWN_BIASES: _Layout = {**_BESIDE_QUERY_BIASES, "q_proj.bias": ("HD",), "attn_gate.output.bias": ("H", "D")}

_PLAIN: _Layout = {
    "q_proj.weight": ("HD", "M"),
    "k_proj.weight": ("GD", "M"),
    "v_proj.weight": ("GD", "M"),
    "o_proj.weight": ("M", "HD"),
}
_SINK_BIASES: _Layout = {**_BESIDE_QUERY_BIASES, "q_proj.bias": ("HD",)}
_SINKS: _Layout = {**_PLAIN, "sinks": ("H",)}
_OWN_SINKS: _Layout = {**_PLAIN, "attn_gate.partition.bias": ("H", "1")}

_STACKED: _Layout = {"qkv.weight": ("3HD", "M"), "out.weight": ("M", "HD"), "W_g": ("H", "D", "D")}
_STACKED_BIASES: _Layout = {"qkv.bias": ("3HD",), "out.bias": ("M",)}


def from_fused_query_gate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the attention of the Qwen3-Next family to a `g1` layer with query/key norm.

    In that family `q_proj` returns each head's query and then its gate, and the norms scale by 1 + weight. Load the
    result into a layer with `gate="g1"`, `qk_norm=True` and the checkpoint's partial rotary embedding; with biases,
    `bias=True` and `gate="output:input:b0"`. Its norms have the epsilon 1e-6, the family's default.

    Args:
        state: `q_proj.weight` (2HD, M), `k_proj.weight` and `v_proj.weight` (GD, M), `o_proj.weight` (M, HD),
            `q_norm.weight` and `k_norm.weight` (D,); a bias for each of the four projections, or for none.

    Returns:
        The state dict; norms in float32 or better, since half precision would round 1 + weight to a few bits.
    """
    shape = _require_layout(state, _FUSED, _FUSED_BIASES)
    own = {name: tensor for name, tensor in state.items() if not name.startswith("q_proj.")}
    for name in ("q_norm.weight", "k_norm.weight"):
        own[name] = 1 + widen(state[name])
    query_HDM, gate_HDM = _split_heads(state["q_proj.weight"], shape)
    own["q_proj.weight"], own["attn_gate.output.weight"] = query_HDM.flatten(0, 1), gate_HDM.transpose(1, 2)
    if "q_proj.bias" in state:
        query_HD, own["attn_gate.output.bias"] = _split_heads(state["q_proj.bias"], shape)
        own["q_proj.bias"] = query_HD.flatten()
    return _copy_contiguous(own)


def to_fused_query_gate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a `g1` layer with query/key norm to the attention of the Qwen3-Next family.

    It is the exact inverse of `from_fused_query_gate`, except for the norms: 1 + weight rounds a weight near 0. The
    gate's activation, which is not in a state dict, must be the sigmoid.

    Args:
        state: Of `GatedAttention(..., gate="g1", qk_norm=True)`, or with biases `gate="output:input:b0", bias=True`.

    Returns:
        The state dict; norms in the dtype of `q_proj.weight`.
    """
    shape = _require_layout(state, _OWN, _OWN_BIASES)
    fused = {name: tensor for name, tensor in state.items() if not name.startswith("attn_gate.")}
    for name in ("q_norm.weight", "k_norm.weight"):
        fused[name] = (widen(state[name]) - 1).to(state["q_proj.weight"].dtype)
    gate_HDM = state["attn_gate.output.weight"].transpose(1, 2)
    fused["q_proj.weight"] = _join_heads(state["q_proj.weight"], gate_HDM, shape)
    if "q_proj.bias" in state:
        fused["q_proj.bias"] = _join_heads(state["q_proj.bias"], state["attn_gate.output.bias"], shape)
    return _copy_contiguous(fused)


def from_stacked_qkv(state: Mapping[str, Tensor], *, gate: Literal["bma", "bma-query"] = "bma") -> dict[str, Tensor]:
    """Convert bilinearly modulated attention with one projection for query, key and value.

    Load the result into a layer with the same `gate`, and with `bias=True` if the checkpoint has any bias; missing
    biases are then 0.

    Args:
        state: `qkv.weight` (3HD, M), the rows of queries, then keys, then values; `out.weight` (M, HD); `W_g`
            (H, D, D), multiplied by the query from the left; optionally `qkv.bias` (3HD,) and `out.bias` (M,).
        gate: The kind of gate that the checkpoint was trained with.
    """
    require_choice("gate", gate, ("bma", "bma-query"))
    biases = {name: axes for name, axes in _STACKED_BIASES.items() if name in state}
    _require_layout(state, _STACKED, biases)
    names = ("q_proj", "k_proj", "v_proj")
    own = {f"{name}.weight": part for name, part in zip(names, state["qkv.weight"].chunk(3), strict=True)}
    own |= {"o_proj.weight": state["out.weight"], f"attn_gate.{PRESETS[gate].site}.weight": state["W_g"]}
    if biases:
        parts = _bias(state, "qkv").chunk(3)
        own |= {f"{name}.bias": part for name, part in zip(names, parts, strict=True)}
        own["o_proj.bias"] = _bias(state, "out")
    return _copy_contiguous(own)


class _SinkConfig(Protocol):
    """The options of the GPT-OSS family that `gpt_oss_layer` reads."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    attention_dropout: float
    sliding_window: int | None
    layer_types: list[str]
    rope_parameters: Mapping[str, Any]


def gpt_oss_layer(config: _SinkConfig, layer: int) -> AttentionConfig:
    """Return the options of the `GatedAttention` that computes a layer of a GPT-OSS model.

    They include YaRN scaling, whose factor of the scores becomes the temperature. Build the layer with
    `GatedAttention.from_config`, and convert its weights with `from_gpt_oss`.

    Args:
        config: The configuration from transformers.
        layer: The index of the layer, from 0: every other layer has a window.

    Raises:
        InputError: The rotary embedding has another scaling.
    """
    rope, temperature = _gpt_oss_rotary(config.rope_parameters, config.head_dim)
    windowed = config.layer_types[layer] == "sliding_attention"
    return AttentionConfig(
        d_model=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        gate="sink",
        bias=config.attention_bias,
        dropout=config.attention_dropout,
        window=config.sliding_window if windowed else None,
        rope=rope,
        temperature=temperature,
    )


def _gpt_oss_rotary(options: Mapping[str, Any], head_dim: int) -> tuple[Rotary, float]:
    """Return the rotary embedding and its temperature."""
    base, kind = options["rope_theta"], options.get("rope_type", "default")
    if kind == "default":
        return Rotary(base=base), 1.0
    if kind != "yarn" or options.get("mscale") or options.get("factor") is None:
        expected = "those of a plain rotary embedding or of YaRN with a factor"
        raise InputError("rope_parameters", expected=expected, got=dict(options))
    factor = options["factor"]
    amplitude = options.get("attention_factor") or (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    rope = Rotary.yarn(
        head_dim,
        base=base,
        factor=factor,
        original_length=options["original_max_position_embeddings"],
        fast=options.get("beta_fast") or 32.0,
        slow=options.get("beta_slow") or 1.0,
        truncate=options.get("truncate", True),
    )
    return rope, amplitude**-2


def from_gpt_oss(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the attention of the GPT-OSS family to a `sink` layer; `gpt_oss_layer` returns its options.

    In that family each head has a logit in the softmax's denominator, `sinks`; here it is the negative bias of a gate
    that reads the partition function.

    Args:
        state: `q_proj`, `k_proj`, `v_proj`, `o_proj`, each with a `weight`, all or none with a `bias`; `sinks` (H,).
    """
    _require_layout(state, _SINKS, _SINK_BIASES)
    own = {name: tensor for name, tensor in state.items() if name != "sinks"}
    return _copy_contiguous(own | {"attn_gate.partition.bias": -state["sinks"].unsqueeze(-1)})


def to_gpt_oss(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a `sink` layer to the attention of the GPT-OSS family, the exact inverse of `from_gpt_oss`.

    Args:
        state: Of `GatedAttention(..., gate="sink")`, without norms and metric.
    """
    _require_layout(state, _OWN_SINKS, _SINK_BIASES)
    peer = {name: tensor for name, tensor in state.items() if not name.startswith("attn_gate.")}
    return _copy_contiguous(peer | {"sinks": -state["attn_gate.partition.bias"].squeeze(-1)})


def _split_heads(fused: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """Split (2HD, ...) into each head's query and gate, both (H, D, ...)."""
    query, gate = fused.unflatten(0, (shape.num_heads, 2, shape.head_dim)).unbind(1)
    return query, gate


def _join_heads(query: Tensor, gate: Tensor, shape: HeadShape) -> Tensor:
    """Join queries (HD, ...) and gates (H, D, ...) to (2HD, ...), interleaved by head."""
    by_head = query.unflatten(0, (shape.num_heads, shape.head_dim))
    return torch.stack((by_head, gate), dim=1).flatten(0, 2)


def _bias(state: Mapping[str, Tensor], projection: str) -> Tensor:
    weight = state[f"{projection}.weight"]
    return state.get(f"{projection}.bias", weight.new_zeros(weight.shape[0]))


def _copy_contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to contiguous memory, which files of weights require."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _require_layout(state: Mapping[str, Tensor], weights: _Layout, biases: _Layout) -> HeadShape:
    """Return the sizes of the layer.

    Raise InputError unless the state has exactly the names and shapes of the weights, and of the biases if it has any.
    """
    layout = weights | biases if biases.keys() & state.keys() else weights
    missing, unexpected = sorted(layout.keys() - state.keys()), sorted(state.keys() - layout.keys())
    if missing or unexpected:
        hint = (
            f"Missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}. "
            "Give one layer's tensors, without a prefix."
        )
        raise InputError("state", expected=f"{', '.join(sorted(layout))} and nothing else", hint=hint)
    # The first tensor with an axis determines its size. Tensors with too few or too many axes are reported below.
    given: dict[str, tuple[int, str]] = {}
    for name, axes in layout.items():
        for axis, extent in zip(axes, state[name].shape, strict=False):
            if axis in ("M", "HD", "GD", "D", "H"):
                given.setdefault(axis, (max(1, extent), name))
    extents = {axis: extent for axis, (extent, _) in given.items()}
    # Without a tensor of the width of a head, the width follows from the number of heads.
    D = extents.get("D", max(1, extents.get("HD", 1) // extents.get("H", 1)))
    HD = extents.get("HD", D)
    sizes = {"M": extents.get("M", 1), "H": max(1, HD // D), "G": max(1, extents.get("GD", HD) // D), "D": D}
    wrong: list[str] = []
    for name, axes in layout.items():
        # An axis such as 2HD is a product.
        shape = tuple(math.prod(sizes.get(factor) or int(factor) for factor in axis) for axis in axes)
        if state[name].shape != shape:
            wrong.append(f"{name} must have shape ({', '.join(axes)}) = {shape}, got {tuple(state[name].shape)}")
    if wrong:
        sources = ", ".join(sorted({name for _, name in given.values()}))
        found = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        hint = f"By {sources} the sizes are {found}, so {'; '.join(wrong)}."
        raise InputError("state", expected="tensors whose shapes fit together", hint=hint)
    return HeadShape(d_model=sizes["M"], num_heads=sizes["H"], num_kv_heads=sizes["G"], head_dim=sizes["D"])
