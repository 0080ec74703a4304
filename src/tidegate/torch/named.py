"""The layers that have names of their own: `GatedAttention` with its gate settled."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, final

import torch

from tidegate.config import MetricKind
from tidegate.gate import PRESETS, Gate, Grain
from tidegate.torch.attention import GatedAttention, Rope


class AttentionOptions(TypedDict, total=False):
    """The options of `GatedAttention` but its gate; their meanings and defaults stand there."""

    num_kv_heads: int | None
    head_dim: int | None
    causal: bool
    dropout: float
    bias: bool
    rope: Rope
    qk_norm: bool
    window: int | None
    metric: MetricKind | None
    temperature: float
    recompute_gate: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


@final
class MultiHeadAttention(GatedAttention):
    """Plain multi-head attention, without a gate: `o_i = sum_j A_ij v_j`."""

    def __init__(self, d_model: int, num_heads: int, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(d_model, num_heads, gate="none", **options)


@final
class BilinearlyModulatedAttention(GatedAttention):
    """Values under the gate `g = sigmoid(q W_g)`, which each head takes from its own queries.

    index : `"source"` gates with the attended position's query, `o_i = sum_j A_ij (g_j ⊙ v_j)`, in self-attention
            alone; `"query"` with the attending one's, `o_i = g_i ⊙ sum_j A_ij v_j`
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        index: Literal["source", "query"] = "source",
        **options: Unpack[AttentionOptions],
    ) -> None:
        if index not in _BY_INDEX:
            raise ValueError(f"index must be 'source' or 'query'; got {index!r}.")
        super().__init__(d_model, num_heads, gate=_BY_INDEX[index], **options)


@final
class PostGatedAttention(GatedAttention):
    """Attention outputs under a gate that reads the layer's input: `o_i = sigmoid(x_i W) ⊙ sum_j A_ij v_j`.

    grain : `"element"` has a number per feature, `"head"` one per head
    """

    def __init__(
        self, d_model: int, num_heads: int, *, grain: Grain = "element", **options: Unpack[AttentionOptions]
    ) -> None:
        super().__init__(d_model, num_heads, gate=Gate(site="output", reads="input", grain=grain), **options)


_BY_INDEX = {"source": PRESETS["bma"], "query": PRESETS["bma-query"]}
