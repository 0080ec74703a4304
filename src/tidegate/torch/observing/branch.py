"""Find the input of the output projection: the attention output, with an output gate applied if there is one.

The heads' outputs are known if the input of the output projection equals the result of the attention call, gated by an
output gate of this library if there is one. If anything else changes them in between, such as a gate in the model's own
code, the contribution is unknown.

Legend: B batch, T query positions, H heads, D width of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidegate.torch.gate import AttentionGate
from tidegate.torch.observing.counting import CountedCall
from tidegate.torch.observing.modules import ModuleCall
from tidegate.torch.observing.sums import RunningContribution
from tidegate.torch.precision import wide_dtype

_ROUNDINGS = 8
"""Allowed difference between the projection's input and the expected one, in units of rounding."""


class AttentionBranch:
    """The output of one attention call, up to the projection that mixes the heads."""

    def __init__(self, layer: str, output_BHTD: Tensor, counted: CountedCall, sums: RunningContribution) -> None:
        self._layer = layer
        self._ungated_BHTD = self._output_BHTD = output_BHTD
        self._from_set_BHTD = counted.set_output_BHTD
        """The key set's part of the output; None if it is unknown."""
        self._counted = counted
        self._sums = sums
        self._is_confirmed: bool | None = None
        """Whether the input of the last projection was as expected; None before the first."""

    def follow(self, call: ModuleCall, result: Any) -> None:
        """Follow a module call after the attention call."""
        module = call.module
        if isinstance(module, AttentionGate):
            # A traced layer evaluates its gates again after the projection.
            if module.gate.site == "output" and self._is_confirmed is None and _is_within(call.name, self._layer):
                self._gate(module.gate.op, result.detach().transpose(1, 2))
        elif call.args and isinstance(call.args[0], Tensor):
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                self._compare(call.args[0].detach())

    def ends_with(self, name: str) -> bool:
        """Return whether a module that returns now contains the attention call and a projection of its heads."""
        return self._is_confirmed is not None and _is_within(self._layer, name)

    def settle(self) -> None:
        """Add the contribution; if the heads' outputs are not confirmed, the layer's contribution is unknown."""
        if self._is_confirmed and self._from_set_BHTD is not None:
            self._sums.add(self._from_set_BHTD, self._output_BHTD, self._counted)
        else:
            self._sums.known = False

    def _gate(self, op: str, values_BHTD: Tensor) -> None:
        from_set_BHTD = self._counted.set_output_BHTD
        assert from_set_BHTD is not None
        if op == "multiply":
            self._output_BHTD = self._ungated_BHTD * values_BHTD
            self._from_set_BHTD = from_set_BHTD * values_BHTD
        elif op == "add":
            # The key set's part stays: the added values do not depend on the keys.
            self._output_BHTD = self._ungated_BHTD + values_BHTD
        else:
            self._output_BHTD, self._from_set_BHTD = values_BHTD, None

    def _compare(self, given: Tensor) -> None:
        """Compare the input of a projection with the heads' outputs, if it has their size."""
        B, H, T, D = self._output_BHTD.shape
        if given.shape[-1] != H * D or given.numel() != self._output_BHTD.numel():
            return
        # Kernels differ in their output for a query that may see nothing.
        counted, dtype = self._counted.counted_BHT.unsqueeze(-1), wide_dtype(given.dtype)
        expected = torch.where(counted, self._output_BHTD.to(dtype), 0)
        difference = torch.where(counted, given.reshape(B, T, H, D).transpose(1, 2).to(dtype), 0) - expected
        allowed = _ROUNDINGS * torch.finfo(given.dtype).eps * torch.linalg.vector_norm(expected)
        self._is_confirmed = bool(torch.linalg.vector_norm(difference) <= allowed)


def _is_within(name: str, outer: str) -> bool:
    """Return whether a module is the other, or inside it."""
    return not outer or name == outer or name.startswith(f"{outer}.")
