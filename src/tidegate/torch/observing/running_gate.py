"""What a gate lets through, summed up call after call.

Legend: N tokens, H heads at the gated site, D gated width.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from tidegate.gate import Activation
from tidegate.torch.observing.observation import GateSummary
from tidegate.torch.observing.running import RunningSpread

_CLOSED = 0.1
"""A gate below this lets little through."""
_MARGIN = 0.05
"""A gate this close to an end of its range is saturated."""
_ENDS: dict[Activation, tuple[float, float]] = {"sigmoid": (0.0, 1.0), "twosigmoid": (0.0, 2.0), "tanh1": (0.0, 2.0)}
"""The ranges of the activations that have two ends; the others grow without bound."""


class RunningGate:
    """One gate's mean, share below 0.1, saturation and spreads, in float64.

    A value is saturated within 0.05 of an end of the activation's range: of 0 or 1 for `sigmoid`, of 0 or 2 for
    `twosigmoid` and `tanh1`. The other activations have no two ends, and no saturation.
    """

    def __init__(self, activation: Activation) -> None:
        self._ends = _ENDS.get(activation)
        self._spread = RunningSpread()
        self._shares = RunningSpread()

    def add(self, values_NHD: Tensor) -> None:
        """Take in the gate's values of some tokens."""
        if len(values_NHD) == 0:
            return
        values = values_NHD.detach().cpu().double()
        counted = torch.ones((), dtype=torch.bool)
        self._spread.add(values, counted, (0,))
        saturated = torch.zeros_like(values, dtype=torch.bool)
        if self._ends is not None:
            low, high = self._ends
            saturated = (values <= low + _MARGIN) | (values >= high - _MARGIN)
        self._shares.add(torch.stack((values < _CLOSED, saturated)).double(), counted, (1, 3))

    def copy(self) -> RunningGate:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._spread, twin._shares = copy(self._spread), copy(self._shares)
        return twin

    def summary(self) -> GateSummary | None:
        """What is known so far; None if nothing is."""
        if self._spread.mean.ndim == 0:
            return None
        mean_H = self._spread.mean.mean(dim=-1)
        below_H, saturated_H = self._shares.mean
        return GateSummary(
            mean=tuple(mean_H.tolist()),
            below=tuple(below_H.tolist()),
            saturated=None if self._ends is None else tuple(saturated_H.tolist()),
            token_spread=tuple(self._spread.std.mean(dim=-1).tolist()),
            head_spread=float(mean_H.std(correction=0)),
        )
