"""Observe the gates and attention of a model, and its loss by position, on a few examples.

Legend: N tokens, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.gate import Site
from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.model import row_parts
from tidegate.lab.training.records import LayerByHead, ObservationSummary
from tidegate.torch.attention import GatedAttention
from tidegate.torch.gate import AttentionGate, repeat_heads
from tidegate.torch.observing import LayerObservation, Observation, observe
from tidegate.torch.observing.modules import ModuleCall, follow_modules
from tidegate.torch.observing.sums import effective_rank
from tidegate.torch.precision import widen
from tidegate.torch.weights import Model

_NUM_STRETCHES = 32
"""Points of a curve over positions."""
_SITES: tuple[Site, ...] = ("value", "output", "dense")
"""Gate sites between a value and the layer's output."""


@torch.no_grad()
def observe_probe(model: Model, batch: Batch, *, tokens: int) -> ObservationSummary | None:
    """Observe a model on a batch, without dropout, after `tokens` tokens of training.

    Nothing that the training depends on changes: no random number is drawn, and the model is left in training mode.
    Return None if a number is not finite, as when a model diverges.
    """
    model.eval()
    gates = GateValues()
    with observe(model) as watcher, follow_modules(model, gates):
        model(batch.inputs)
    model.train()
    seen = summarize_observation(watcher.observation(), tokens=tokens)
    summary = replace(seen, map_rank=map_ranks(model, gates.by_gate))
    return summary if _is_finite(asdict(summary)) else None


def summarize_observation(observation: Observation, *, tokens: int) -> ObservationSummary:
    """Return the means of an observation by layer and head, for records."""
    layers = observation.layers
    sites = sorted({site for layer in layers for site in layer.gates})
    known = all("contribution" in layer.heads for layer in layers)
    return ObservationSummary(
        tokens=tokens,
        entropy=_means(layers, "entropy"),
        sink_mass=_means(layers, "mass"),
        sink_impact=_means(layers, "impact"),
        sink_contribution=_means(layers, "contribution") if known else None,
        sink_logit=_means(layers, "sink") if all("sink" in layer.heads for layer in layers) else None,
        gates={
            site: {
                "mean": tuple(layer.gates[site].mean for layer in layers),
                "below": tuple(layer.gates[site].below for layer in layers),
                "spread": tuple(layer.gates[site].token_spread for layer in layers),
            }
            for site in sites
        },
        largest_activation=tuple(layer.residual.largest for layer in layers if layer.residual),
        effective_rank=tuple(layer.residual.effective_rank for layer in layers if layer.residual),
    )


@torch.no_grad()
def loss_by_position(model: Model, batch: Batch) -> tuple[tuple[float, float], ...]:
    """Return the mean loss of stretches of positions, with the middle of each stretch, where it is finite."""
    model.eval()
    # (B, T), 0 where there is no target.
    losses = torch.cat(
        [
            F.cross_entropy(widen(model(part.inputs)).mT, part.targets, reduction="none", ignore_index=NO_TARGET)
            for part in row_parts(model, batch)
        ]
    )
    model.train()
    counted = batch.targets != NO_TARGET
    stretches = torch.arange(losses.shape[1]).chunk(_NUM_STRETCHES)
    means = [float(losses[:, positions].sum() / counted[:, positions].sum()) for positions in stretches]
    middles = [float(positions.double().mean()) + 1 for positions in stretches]
    return tuple((middle, mean) for middle, mean in zip(middles, means, strict=True) if math.isfinite(mean))


def _means(layers: Sequence[LayerObservation], statistic: str) -> LayerByHead:
    return tuple(
        tuple(moments.mean if moments.count else None for moments in layer.heads[statistic]) for layer in layers
    )


def _is_finite(value: Any) -> bool:
    """Return whether every number in nested dictionaries and tuples is finite; None counts as finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    return value is None or math.isfinite(value)


@final
class GateValues:
    """The last values of each gate of a model; for `follow_modules`."""

    def __init__(self) -> None:
        self.by_gate: dict[nn.Module, Tensor] = {}

    def begin(self) -> None:
        """Forget the values of the batch before."""
        self.by_gate.clear()

    def leave(self, call: ModuleCall, result: Any) -> None:
        """Keep a gate's values."""
        if isinstance(call.module, AttentionGate):
            self.by_gate[call.module] = result.detach()

    def end(self) -> None:
        """Keep the values until the next batch."""


def map_ranks(model: nn.Module, gate_values: Mapping[nn.Module, Tensor]) -> LayerByHead | None:
    r"""Return the effective rank of each head's map from value to output, over the tokens of a batch.

    A head takes token i through $M_i = W_V \operatorname{diag}(g_i) W_O \operatorname{diag}(d_i)$: g is the product of
    the element gates at the value and output sites, d the gate at the dense site, each 1 where there is none. The rank
    is that of all $M_i$ side by side. It is at most the head's width; without a gate it is that of $W_V W_O$. A gate of
    grain `head` and a sink scale a token's whole map and do not change its rank: they are left out.

    Args:
        model: One of our models.
        gate_values: The gates' values on one batch of self-attention.

    Returns:
        A row of heads for each layer; None if a gate on the way adds or replaces, so that there is no such map.
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
    $W_V = Q R$ it has the eigenvalues of the same with R for $W_V$, a matrix as narrow as the head: the others would be
    rounding errors, whose square roots are not small.

    Args:
        value_MD: $W_V$, in float64 like all others.
        output_DM: $W_O$.
        gate_ND: g, or (N, 1) if it is the same for all channels; None is 1.
        dense_NM: d, or (N, 1); None is 1.

    Returns:
        (D, D), or (M, M) if the head is wider than the model.
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
