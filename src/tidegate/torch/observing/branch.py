"""Find what reaches the output projection: the attention output, or that under an output gate.

What the heads hand on is known if it is seen twice: as the result of the attention call, and as the input of the output
projection, which must be that result, or that result under an output gate of ours. Anything in between that is not a
module of ours, such as a gate that a model spells out itself, makes the two differ: then nothing is said.

Legend: B batch, T query positions, H heads, D width of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tidegate.torch.gate import AttentionGate
from tidegate.torch.observing.counting import CountedCall
from tidegate.torch.observing.modules import ModuleCall
from tidegate.torch.observing.sums import RunningContribution
from tidegate.torch.precision import wide_dtype

_ROUNDINGS = 8
"""How many units of rounding the projection's input may be away from what is expected."""


class AttentionBranch:
    """The output of one attention call on its way to the projection that mixes the heads."""

    def __init__(self, layer: str, output_BHTD: Tensor, counted: CountedCall, sums: RunningContribution) -> None:
        self._layer = layer
        self._output_BHTD = output_BHTD
        self._counted = counted
        self._sums = sums
        self._gate: tuple[AttentionGate, Tensor] | None = None
        self._is_confirmed: bool | None = None
        """Whether the last projection took in what is expected; None before there was one."""

    def follow(self, call: ModuleCall, result: Any) -> None:
        """Take in that a module was called after the attention call."""
        if isinstance(call.module, AttentionGate):
            # With a trace asked for, gates are evaluated once more after the projection.
            if call.module.gate.site == "output" and self._is_confirmed is None and _is_within(call.name, self._layer):
                self._gate = call.module, result.detach().transpose(1, 2)
        elif call.args and isinstance(call.args[0], Tensor) and _is_projection(call.module):
            self._compare(call.args[0].detach())

    def ends_with(self, name: str) -> bool:
        """Whether a module that returns now held both the attention call and a projection of its heads."""
        return self._is_confirmed is not None and _is_within(self._layer, name)

    def settle(self) -> None:
        """Add up what the heads handed on; if that was not seen, the layer's contributions are unknown."""
        if self._is_confirmed and self._counted.set_output_BHTD is not None and not self._is_replaced():
            gate, op = (None, "multiply") if self._gate is None else (self._gate[1], self._gate[0].gate.op)
            # What a gate adds is the same whatever the keys.
            from_set = self._counted.set_output_BHTD * (1 if gate is None or op == "add" else gate)
            self._sums.add(from_set, self._gated_output(), self._counted)
        else:
            self._sums.known = False

    def _gated_output(self) -> Tensor:
        """(B, H, T, D): the heads' outputs under the output gate."""
        if self._gate is None:
            return self._output_BHTD
        gate, values = self._gate
        if self._is_replaced():
            return values
        return self._output_BHTD * values if gate.gate.op == "multiply" else self._output_BHTD + values

    def _is_replaced(self) -> bool:
        """Whether a function takes the place of the heads' outputs, so that no key's part in them is known."""
        return self._gate is not None and self._gate[0].gate.op == "replace"

    def _compare(self, taken: Tensor) -> None:
        """Compare what a projection took in with what the heads hand on, if it is of that size."""
        B, H, T, D = self._output_BHTD.shape
        if taken.shape[-1] != H * D or taken.numel() != self._output_BHTD.numel():
            return
        # What is handed on for a query that may see nothing differs between kernels.
        counted, dtype = self._counted.counted_BHT.unsqueeze(-1), wide_dtype(taken.dtype)
        expected = torch.where(counted, self._gated_output().to(dtype), 0)
        apart = torch.where(counted, taken.reshape(B, T, H, D).transpose(1, 2).to(dtype), 0) - expected
        allowed = _ROUNDINGS * torch.finfo(taken.dtype).eps * torch.linalg.vector_norm(expected)
        self._is_confirmed = bool(torch.linalg.vector_norm(apart) <= allowed)


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _is_within(name: str, outer: str) -> bool:
    """Whether a module is the other, or inside it."""
    return not outer or name == outer or name.startswith(f"{outer}.")
