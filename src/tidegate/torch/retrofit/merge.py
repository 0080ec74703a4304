"""Fold constant gates into the weights of adjacent projections.

Legend: M model width, H heads at the gated site, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tidegate._validation import InputError
from tidegate.torch.gate import AttentionGate, activate
from tidegate.torch.precision import widen
from tidegate.torch.retrofit.checks import find_places
from tidegate.torch.retrofit.install import record_gates, remove_gates
from tidegate.torch.retrofit.interface import implementation_in
from tidegate.torch.retrofit.layer import GATES_NAME, GatedLayer, acting_layers, gated_layers, require_gates
from tidegate.torch.retrofit.probe import evaluation_mode, exceeds_rounding, largest_change, probe_inputs, run_probe
from tidegate.torch.retrofit.wrappers import unwrap_model


def merge_gates(model: nn.Module) -> None:
    """Fold every gate into a projection and remove it, in place; if one gate cannot be folded, change nothing.

    A gate is constant if its matrix is zero, so that only its bias acts. At the output site its values scale the
    columns of the output projection; at other sites they scale the rows and the bias of the gated projection. A probe
    checks that the outputs change only by rounding.

    Args:
        model: A transformers model, or adapters around one.

    Raises:
        InputError: If a gate is not constant or does not multiply, if a projection is not a plain matrix or is also
            used elsewhere, or if the outputs on the probe change.
    """
    base = unwrap_model(model)
    acting = acting_layers(base).values()
    for layer in acting:
        layer.require_plain_gates()
    folds = [_fold(base, layer, cast("AttentionGate", gate)) for layer in acting for gate in layer.modules.children()]
    require_gates(base, folds)
    inputs, implementation = probe_inputs(base), implementation_in(base)
    layers = {layer: getattr(layer.layout.module, GATES_NAME) for layer in gated_layers(base)}
    folded = [weight for fold in folds for weight in fold.projection.parameters(recurse=False)]
    weights = {weight: weight.detach().clone() for weight in folded}
    with evaluation_mode(base), torch.no_grad():
        before = run_probe(base, inputs)
        for fold in folds:
            fold.apply()
        remove_gates(base)
        after = run_probe(base, inputs)
        if not exceeds_rounding(after, before, base.dtype):
            return
        for weight, content in weights.items():
            weight.copy_(content)
        for layer, modules in layers.items():
            layer.install(modules)
        base.set_attn_implementation(implementation)
        record_gates(base)
    raise InputError(
        "model",
        expected="one whose gates act directly after its projections",
        got=type(base).__name__,
        hint=f"Merging would change outputs by up to {largest_change(after, before):.3g}, because something else "
        "changes a projection's result before its gate does.",
    )


def constant_values(gate: AttentionGate) -> Tensor | None:
    """Return the gate's values (H, D), with D = 1 for the grain `head`; None unless they are constant."""
    weights = dict(gate.named_parameters())
    bias = weights.pop("bias", None)
    if weights and all(weight.any() for weight in weights.values()):
        return None
    if bias is None:
        bias = next(iter(weights.values())).new_zeros(gate.num_matrices, gate.gate.gated_width(gate.shape))
    logits = widen(bias.detach())
    return activate(gate.gate.activation, logits).repeat_interleave(gate.num_heads // gate.num_matrices, dim=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fold:
    """Factors, one for each channel, for the inputs or the results of a projection."""

    projection: nn.Linear | Conv1D
    factors: Tensor
    of_input: bool

    def apply(self) -> None:
        weight = cast("Tensor", self.projection.weight)
        # The matrix of a Linear has shape (results, inputs), that of a Conv1D (inputs, results).
        along_rows = self.of_input == isinstance(self.projection, Conv1D)
        weight.copy_(widen(weight) * (self.factors[:, None] if along_rows else self.factors))
        bias: Tensor | None = self.projection.bias
        if bias is not None and not self.of_input:
            bias.copy_(widen(bias) * self.factors)


def _fold(model: PreTrainedModel, layer: GatedLayer, gate: AttentionGate) -> _Fold:
    """Find the projection and the factors of a gate, or raise InputError."""
    site, values = gate.gate.site, constant_values(gate)
    slot = layer.layout.output if site in ("output", "dense") else layer.layout.parts[site].slot
    projection = None if slot is None else slot.module
    if gate.gate.op != "multiply":
        problem = "It adds to its target, which scaling a projection cannot express."
    elif values is None:
        problem = "Its matrix is not zero, so it is not constant."
    elif slot is None:
        problem = "No projection takes the attention output unchanged."
    elif not isinstance(projection, nn.Linear | Conv1D):
        problem = f"{slot.name} is a {type(projection).__name__}, not a plain matrix; merge adapters first."
    elif len(places := find_places(model, lambda child: _share_weights(child, projection))) > 1:
        problem = f"The same weights are in {' and '.join(places)}, and would change there too."
    else:
        factors = _factors(layer, gate, projection, values)
        return _Fold(projection=projection, factors=factors, of_input=site == "output")
    expected = "one whose gates can be merged"
    raise InputError("model", expected=expected, got=f"{gate.gate} in {layer.layout.name}", hint=problem)


def _share_weights(ours: nn.Module, theirs: nn.Module) -> bool:
    return any(
        a is b or (a.data_ptr() == b.data_ptr() != 0)
        for a in ours.parameters(recurse=False)
        for b in theirs.parameters(recurse=False)
    )


def _factors(layer: GatedLayer, gate: AttentionGate, projection: nn.Linear | Conv1D, values: Tensor) -> Tensor:
    if gate.gate.site == "dense":
        return values.flatten()
    by_channel = values.expand(-1, layer.layout.shape.head_dim)
    if gate.gate.site == "output":
        return by_channel.flatten()
    width = projection.out_features if isinstance(projection, nn.Linear) else projection.nf
    return layer.layout.parts[gate.gate.site].columns.put(by_channel.new_ones(width), by_channel)
