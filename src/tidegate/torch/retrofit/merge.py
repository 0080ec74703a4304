"""Fold gates that are constant into the weights beside them.

Legend: M model width, H heads at the gated site, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tidegate.torch.gate import AttentionGate, activate
from tidegate.torch.precision import widen
from tidegate.torch.retrofit.install import remove_gates
from tidegate.torch.retrofit.interface import implementation_in
from tidegate.torch.retrofit.layer import GATES_NAME, GatedLayer, acting_layers, gated_layers
from tidegate.torch.retrofit.probe import (
    answers,
    evaluation_mode,
    exceeds_rounding,
    largest_change,
    largest_number,
    probe_inputs,
)
from tidegate.torch.retrofit.record import record_gates
from tidegate.torch.retrofit.refusal import places_of_weights
from tidegate.torch.retrofit.wrappers import unwrap_model


def merge_gates(model: nn.Module) -> None:
    """Fold every gate into a projection and take it out, in place; if one of them cannot be, nothing is changed.

    A gate is constant if its matrix is zero, so that only its bias says something. At the output site its values scale
    the columns of the output projection; elsewhere the rows, and the bias, of the projection whose result it gates. The
    model computes the same as before but for rounding, which a probe makes sure of.

    model : of transformers, or adapters around one

    Raises a `ValueError` if a gate is not constant or does not multiply, or a projection is no plain matrix or is used
    in another place too; it names the layer. And if the probe's answers change.
    """
    base = unwrap_model(model)
    folds = [_fold(base, layer, gate) for layer in acting_layers(base).values() for gate in _gates(layer)]
    if not folds:
        raise ValueError(f"{type(base).__name__} has no gates to merge; call add_gates(model) first.")
    inputs = probe_inputs(base)
    undo = _Undo(base, folds)
    with evaluation_mode(base):
        before = answers(base, inputs)
        for fold in folds:
            fold.apply()
        remove_gates(base)
        change, size = largest_change(answers(base, inputs), before), largest_number(before)
    if exceeds_rounding(change, size, base.dtype):
        undo()
        raise ValueError(
            f"The gates of {type(base).__name__} cannot be merged: answers of size {size:.3g} would change by up to "
            f"{change:.3g}, so that something else acts on a projection's result before its gate does."
        )


def constant_values(gate: AttentionGate) -> Tensor | None:
    """Return the gate's values (H, D), D = 1 for the grain `head`, if they are constant; else None."""
    weights = dict(gate.named_parameters())
    bias = weights.pop("bias", None)
    if weights and all(weight.any() for weight in weights.values()):
        return None
    if bias is not None:
        logits = widen(bias.detach())
    else:
        logits = widen(next(reversed(weights.values()))).new_zeros(gate.num_matrices, gate.gate.gated_width(gate.shape))
    return activate(gate.gate.activation, logits).repeat_interleave(gate.num_heads // gate.num_matrices, dim=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fold:
    """Factors for the inputs or for the results of a projection."""

    projection: nn.Linear | Conv1D
    factors: Tensor
    """One for each channel."""
    of_input: bool

    @torch.no_grad()
    def apply(self) -> None:
        weight = cast("Tensor", self.projection.weight)
        # A Linear keeps its matrix results first, a Conv1D inputs first.
        along_rows = self.of_input == isinstance(self.projection, Conv1D)
        weight.copy_(widen(weight) * (self.factors[:, None] if along_rows else self.factors))
        bias: Tensor | None = self.projection.bias
        if bias is not None and not self.of_input:
            bias.copy_(widen(bias) * self.factors)


class _Undo:
    """Weights, gates and implementation of a model before its gates are merged; a call restores them."""

    def __init__(self, model: PreTrainedModel, folds: Sequence[_Fold]) -> None:
        self.model = model
        self.implementation = implementation_in(model)
        self.weights = {
            weight: weight.detach().clone() for fold in folds for weight in fold.projection.parameters(recurse=False)
        }
        self.gates = {layer: getattr(layer.layout.module, GATES_NAME) for layer in gated_layers(model)}

    @torch.no_grad()
    def __call__(self) -> None:
        for weight, content in self.weights.items():
            weight.copy_(content)
        for layer, modules in self.gates.items():
            layer.install(modules)
        self.model.set_attn_implementation(self.implementation)
        record_gates(self.model)


def _gates(layer: GatedLayer) -> list[AttentionGate]:
    layer.require_plain_gates()
    return [cast("AttentionGate", gate) for gate in layer.modules.children()]


def _fold(model: PreTrainedModel, layer: GatedLayer, gate: AttentionGate) -> _Fold:
    def refusal(reason: str) -> ValueError:
        return ValueError(f"The gate {gate.gate} of {layer.layout.name} cannot be merged: {reason}.")

    if gate.gate.op != "multiply":
        raise refusal("it adds to what it gates, which no projection's matrix can do")
    if (values := constant_values(gate)) is None:
        raise refusal("it is not constant, since its matrix is not zero")
    site = gate.gate.site
    at_output = site in ("output", "dense")
    slot = layer.layout.output if at_output else layer.layout.parts[site].slot
    if slot is None:
        raise refusal("no projection takes the attention output as it is")
    projection = slot.module
    if not isinstance(projection, nn.Linear | Conv1D):
        raise refusal(f"{slot.name} is a {type(projection).__name__}, not a plain matrix; merge adapters first")
    if len(places := places_of_weights(model, projection)) > 1:
        raise refusal(f"the same weights are in {' and '.join(places)}, and would be changed there too")
    return _Fold(projection=projection, factors=_factors(layer, gate, projection, values), of_input=site == "output")


def _factors(layer: GatedLayer, gate: AttentionGate, projection: nn.Linear | Conv1D, values: Tensor) -> Tensor:
    if gate.gate.site == "dense":
        return values.flatten()
    by_channel = values.expand(-1, layer.layout.shape.head_dim)
    if gate.gate.site == "output":
        return by_channel.flatten()
    width = projection.out_features if isinstance(projection, nn.Linear) else projection.nf
    columns = layer.layout.parts[gate.gate.site].columns
    return columns.put(by_channel.new_ones(width), by_channel)
