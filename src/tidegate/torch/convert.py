"""Checkpoints of other attention layers as state dicts of `GatedAttention`, and back.

Legend: M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tidegate.gate import PRESETS
from tidegate.sizes import HeadShape
from tidegate.torch.precision import widen

_Layout: TypeAlias = dict[str, tuple[str, ...]]
"""What a state dict holds: each tensor's axes by name. An axis is a product, such as 2HD."""

_BESIDE_QUERY: _Layout = {
    "k_proj.weight": ("GD", "M"),
    "v_proj.weight": ("GD", "M"),
    "o_proj.weight": ("M", "HD"),
    "q_norm.weight": ("D",),
    "k_norm.weight": ("D",),
}
"""What stays as it is, norms aside, when query and gate are fused or parted."""
_BESIDE_QUERY_BIASES: _Layout = {"k_proj.bias": ("GD",), "v_proj.bias": ("GD",), "o_proj.bias": ("M",)}

_FUSED: _Layout = {**_BESIDE_QUERY, "q_proj.weight": ("2HD", "M")}
_FUSED_BIASES: _Layout = {**_BESIDE_QUERY_BIASES, "q_proj.bias": ("2HD",)}

_OWN: _Layout = {**_BESIDE_QUERY, "q_proj.weight": ("HD", "M"), "attn_gate.output.weight": ("H", "M", "D")}
_OWN_BIASES: _Layout = {**_BESIDE_QUERY_BIASES, "q_proj.bias": ("HD",), "attn_gate.output.bias": ("H", "D")}

_STACKED: _Layout = {"qkv.weight": ("3HD", "M"), "out.weight": ("M", "HD"), "W_g": ("H", "D", "D")}
_STACKED_BIASES: _Layout = {"qkv.bias": ("3HD",), "out.bias": ("M",)}


def from_fused_query_gate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The attention of the Qwen3-Next family as a `g1` layer with query/key norm.

    There `q_proj` gives each head's query and then its gate, and the norms scale by 1 + weight. The layer to load into
    has `gate="g1"`, `qk_norm=True` and the checkpoint's partial rotary; with biases, `bias=True` and
    `gate="output:input:b0"`. Its norms have the epsilon 1e-6, the family's default.

    state   : `q_proj.weight` (2HD, M), `k_proj.weight` and `v_proj.weight` (GD, M), `o_proj.weight` (M, HD),
              `q_norm.weight` and `k_norm.weight` (D,); a bias for each of the four projections, or for none
    returns : new tensors; the norms are float32 or better, since half precision would round 1 + weight to a few bits
    """
    shape = _require_layout(state, _whole_layout(_FUSED, _FUSED_BIASES, state))
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
    """A `g1` layer with query/key norm as the attention of the Qwen3-Next family: `from_fused_query_gate` undone.

    There and back gives the same bits, but for the norms: 1 + weight rounds a weight near 0. A state dict does not
    tell its gate's activation, which must be the sigmoid.

    state   : of `GatedAttention(..., gate="g1", qk_norm=True)`, or with biases `gate="output:input:b0", bias=True`
    returns : new tensors; the norms have the dtype of `q_proj.weight`
    """
    shape = _require_layout(state, _whole_layout(_OWN, _OWN_BIASES, state))
    fused = {name: tensor for name, tensor in state.items() if not name.startswith("attn_gate.")}
    for name in ("q_norm.weight", "k_norm.weight"):
        fused[name] = (widen(state[name]) - 1).to(state["q_proj.weight"].dtype)
    gate_HDM = state["attn_gate.output.weight"].transpose(1, 2)
    fused["q_proj.weight"] = _join_heads(state["q_proj.weight"], gate_HDM, shape)
    if "q_proj.bias" in state:
        fused["q_proj.bias"] = _join_heads(state["q_proj.bias"], state["attn_gate.output.bias"], shape)
    return _copy_contiguous(fused)


def from_stacked_qkv(state: Mapping[str, Tensor], *, gate: Literal["bma", "bma-query"] = "bma") -> dict[str, Tensor]:
    """A checkpoint of bilinearly modulated attention with one projection for query, key and value, as our layer.

    The layer to load into has the same `gate`, and `bias=True` if the checkpoint has any bias; a bias that the
    checkpoint lacks beside another is 0.

    state   : `qkv.weight` (3HD, M), queries over keys over values; `out.weight` (M, HD); `W_g` (H, D, D), which the
              query enters from the left; perhaps `qkv.bias` (3HD,) and `out.bias` (M,)
    gate    : which reading of the gate the checkpoint was trained with
    returns : new tensors
    """
    if gate not in ("bma", "bma-query"):
        raise ValueError(f"gate must be 'bma' or 'bma-query', the gates that W_g can be; got {gate!r}.")
    biases = {name: axes for name, axes in _STACKED_BIASES.items() if name in state}
    _require_layout(state, _STACKED | biases)
    names = ("q_proj", "k_proj", "v_proj")
    own = {f"{name}.weight": part for name, part in zip(names, state["qkv.weight"].chunk(3), strict=True)}
    own |= {"o_proj.weight": state["out.weight"], f"attn_gate.{PRESETS[gate].site}.weight": state["W_g"]}
    if biases:
        parts = _bias(state, "qkv").chunk(3)
        own |= {f"{name}.bias": part for name, part in zip(names, parts, strict=True)}
        own["o_proj.bias"] = _bias(state, "out")
    return _copy_contiguous(own)


def _split_heads(fused: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """(2HD, ...) as each head's query and gate, (H, D, ...) both."""
    query, gate = fused.unflatten(0, (shape.num_heads, 2, shape.head_dim)).unbind(1)
    return query, gate


def _join_heads(query: Tensor, gate: Tensor, shape: HeadShape) -> Tensor:
    """Queries (HD, ...) and gates (H, D, ...) as (2HD, ...), in turns by head."""
    by_head = query.unflatten(0, (shape.num_heads, shape.head_dim))
    return torch.stack((by_head, gate), dim=1).flatten(0, 2)


def _bias(state: Mapping[str, Tensor], projection: str) -> Tensor:
    weight = state[f"{projection}.weight"]
    return state.get(f"{projection}.bias", weight.new_zeros(weight.shape[0]))


def _copy_contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in memory of their own, in order: what a file of weights can hold."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _whole_layout(weights: _Layout, biases: _Layout, state: Collection[str]) -> _Layout:
    """The layout of the weights, with that of all the biases if the state has any of them."""
    return weights | biases if any(name in state for name in biases) else weights


def _require_layout(state: Mapping[str, Tensor], layout: _Layout) -> HeadShape:
    """The state has the layout's names and shapes, and nothing else; returns the sizes that it follows from."""
    missing, unexpected = sorted(layout.keys() - state.keys()), sorted(state.keys() - layout.keys())
    if missing or unexpected:
        raise ValueError(
            f"state must hold {', '.join(sorted(layout))} and nothing else; "
            f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}. "
            "Give one layer's tensors, without a prefix."
        )
    sizes, sources = _sizes(state, layout)
    wanted = {name: tuple(_extent(axis, sizes) for axis in axes) for name, axes in layout.items()}
    wrong = [
        f"{name} must have shape ({', '.join(layout[name])}) = {shape}; got {tuple(state[name].shape)}"
        for name, shape in wanted.items()
        if state[name].shape != shape
    ]
    if wrong:
        found = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        raise ValueError(f"By {', '.join(sources)} the state has {found}, so {'; '.join(wrong)}.")
    return HeadShape(d_model=sizes["M"], num_heads=sizes["H"], num_kv_heads=sizes["G"], head_dim=sizes["D"])


def _sizes(state: Mapping[str, Tensor], layout: _Layout) -> tuple[dict[str, int], list[str]]:
    """M, H, G and D, at least 1, and the tensors that they are read from: where M, HD, GD and D occur first."""
    given: dict[str, int] = {}
    sources: set[str] = set()
    for name, axes in layout.items():
        # A tensor may have too few axes, or too many; the check that follows names it.
        for axis, extent in zip(axes, state[name].shape, strict=False):
            if axis in ("M", "HD", "GD", "D") and axis not in given:
                given[axis] = max(1, extent)
                sources.add(name)
    D = given.get("D", 1)
    HD = given.get("HD", D)
    sizes = {"M": given.get("M", 1), "H": max(1, HD // D), "G": max(1, given.get("GD", HD) // D), "D": D}
    return sizes, sorted(sources)


def _extent(axis: str, sizes: Mapping[str, int]) -> int:
    """What an axis such as 2HD comes to."""
    return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in axis)
