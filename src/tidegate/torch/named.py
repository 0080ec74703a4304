"""The layers that have names of their own: `GatedAttention` with its gate given.

Their other options are those of `AttentionConfig`, as in `GatedAttention`.
"""

from __future__ import annotations

from typing import Literal, Unpack, final

import torch

from tidegate.config import AttentionOptions, accept_options
from tidegate.gate import PRESETS, Gate, Grain
from tidegate.torch.attention import GatedAttention


@final
class MultiHeadAttention(GatedAttention):
    """Plain multi-head attention, without a gate: `o_i = sum_j A_ij v_j`."""

    @accept_options(AttentionOptions)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(d_model, num_heads, gate="none", device=device, dtype=dtype, **options)


@final
class BilinearlyModulatedAttention(GatedAttention):
    """Values under the gate `g = sigmoid(q W_g)`, which each head takes from its own queries.

    index : `"source"` gates with the attended position's query, `o_i = sum_j A_ij (g_j ⊙ v_j)`, in self-attention
            alone; `"query"` with the attending one's, `o_i = g_i ⊙ sum_j A_ij v_j`
    """

    @accept_options(AttentionOptions)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        index: Literal["source", "query"] = "source",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        if index not in _BY_INDEX:
            raise ValueError(f"index must be 'source' or 'query'; got {index!r}.")
        super().__init__(d_model, num_heads, gate=_BY_INDEX[index], device=device, dtype=dtype, **options)


@final
class PostGatedAttention(GatedAttention):
    """Attention outputs under a gate that reads the layer's input: `o_i = sigmoid(x_i W) ⊙ sum_j A_ij v_j`.

    grain : `"element"` has a number per feature, `"head"` one per head
    """

    @accept_options(AttentionOptions)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        grain: Grain = "element",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        gate = Gate(site="output", reads="input", grain=grain)
        super().__init__(d_model, num_heads, gate=gate, device=device, dtype=dtype, **options)


_BY_INDEX = {"source": PRESETS["bma"], "query": PRESETS["bma-query"]}
