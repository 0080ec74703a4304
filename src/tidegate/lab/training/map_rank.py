r"""How many directions a head's map from value to output makes use of, over the tokens of a batch.

A head takes token i through $M_i = W_V \operatorname{diag}(g_i) W_O \operatorname{diag}(d_i)$: g is the product of the
element gates at the value and output sites, d the gate at the dense site, each 1 where there is none. The rank is that
of all $M_i$ side by side. It is at most the head's width; without a gate it is that of $W_V W_O$.

Legend: N tokens, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from tidegate.gate import Site
from tidegate.lab.training.records import LayerByHead
from tidegate.torch.attention import GatedAttention
from tidegate.torch.gate import AttentionGate, repeat_heads
from tidegate.torch.observing.modules import ModuleCall
from tidegate.torch.observing.sums import effective_rank

_SITES: tuple[Site, ...] = ("value", "output", "dense")
"""Those between a value and the layer's output."""


@final
class GateValues:
    """Keep what each gate of a model returned last; for `follow_modules`."""

    def __init__(self) -> None:
        self.by_gate: dict[nn.Module, Tensor] = {}

    def begin(self) -> None:
        """Nothing is kept of what came before a batch."""
        self.by_gate.clear()

    def leave(self, call: ModuleCall, result: Any) -> None:
        """Keep what a gate returned."""
        if isinstance(call.module, AttentionGate):
            self.by_gate[call.module] = result.detach()

    def end(self) -> None:
        """The values stay until the next batch."""


def map_ranks(model: nn.Module, gate_values: Mapping[nn.Module, Tensor]) -> LayerByHead | None:
    """Return the effective rank of the map from value to output, by layer and head of a model of ours.

    A gate of grain `head` and a sink multiply a token's whole map, which turns it in no direction: they are left out.

    gate_values : what the gates returned on one batch of self-attention
    returns     : a row for each layer; None if a gate on the way adds or replaces, so that there is no such map
    """
    layers = [module for module in model.modules() if isinstance(module, GatedAttention)]
    if any(gate.op != "multiply" for layer in layers for gate in layer.gates if gate.site in _SITES):
        return None
    return tuple(_layer_ranks(layer, gate_values) for layer in layers)


@torch.no_grad()
def _layer_ranks(layer: GatedAttention, gate_values: Mapping[nn.Module, Tensor]) -> tuple[float, ...]:
    num_heads, group_size = layer.shape.num_heads, layer.shape.group_size
    factor_NHD: Tensor | None = None
    dense_NM: Tensor | None = None
    for site in _SITES:
        gate = layer.attn_gate.at(site)
        if gate is None or gate.gate.grain == "head":
            continue
        values = gate_values[gate].double()
        if site == "dense":
            dense_NM = values.flatten(0, 1)
        else:
            values_NHD = repeat_heads(values, num_heads).flatten(0, 1)
            factor_NHD = values_NHD if factor_NHD is None else factor_NHD * values_NHD
    arrays = layer.arrays()
    return tuple(
        effective_rank(
            map_products(
                arrays.W_V[head // group_size].double(),
                arrays.W_O[head].double(),
                gate_ND=None if factor_NHD is None else factor_NHD[:, head],
                dense_NM=dense_NM,
            )
        )
        for head in range(num_heads)
    )


def map_products(
    value_MD: Tensor, output_DM: Tensor, *, gate_ND: Tensor | None = None, dense_NM: Tensor | None = None
) -> Tensor:
    r"""Return a matrix with the eigenvalues of $\langle M_i M_i^T \rangle_i$ that are not 0 by construction.

    The mean over tokens is $W_V (\langle g_i g_i^T \circ W_O \operatorname{diag}(d_i^2) W_O^T \rangle_i) W_V^T$. With
    $W_V = Q R$ it has the eigenvalues of the same with R for $W_V$, a matrix as narrow as the head: those that are left
    out would come as roundings, whose square roots are not small.

    value_MD  : $W_V$, in float64 like all others
    output_DM : $W_O$
    gate_ND   : g, or (N, 1) if it is the same for all channels; None is 1
    dense_NM  : d, or (N, 1); None is 1
    returns   : (D, D), or (M, M) if the head is wider than the model
    """
    gate_ND = output_DM.new_ones(1, 1) if gate_ND is None else gate_ND
    dense_NM = output_DM.new_ones(1, 1) if dense_NM is None else dense_NM
    width = output_DM.shape[0]
    gate_ND, squares_NM = gate_ND.expand(-1, width), dense_NM.square().expand(-1, output_DM.shape[1])
    if 1 in (len(gate_ND), len(squares_NM)):
        # One of the two is the same for all tokens, so that the mean of the product is the product of the means.
        gates_DD = gate_ND.mT @ gate_ND / len(gate_ND)
        inner_DD = gates_DD * ((output_DM * squares_NM.mean(dim=0)) @ output_DM.mT)
    else:
        pairs_MDD = (output_DM[:, None] * output_DM[None]).movedim(-1, 0)
        outputs_NDD = (squares_NM @ pairs_MDD.flatten(1)).unflatten(1, (width, width))
        inner_DD = (gate_ND[:, :, None] * gate_ND[:, None] * outputs_NDD).mean(dim=0)
    upper = torch.linalg.qr(value_MD, mode="r").R
    return upper @ inner_DD @ upper.mT
