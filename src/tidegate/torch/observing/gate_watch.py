"""The gates of a model while it is watched: each gate's values, once it is known which tokens are padding.

Legend: B batch, T positions, H heads at the gated site, D gated width.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tidegate.torch.gate import AttentionGate
from tidegate.torch.observing.observation import GateSummary
from tidegate.torch.observing.running_gate import RunningGate


class GateWatch:
    """Holds a gate's values until its layer has attended, which tells padding, and then adds them up."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[AttentionGate, RunningGate]] = {}
        self._waiting: list[tuple[str, Tensor]] = []

    def take(self, name: str, gate: AttentionGate, values: Tensor) -> None:
        """Hold what a gate returned."""
        self._running.setdefault(name, (gate, RunningGate(gate.gate.activation)))
        self._waiting.append((name, values.detach()))

    def settle(self, within: str, real_by_layer: dict[str, Tensor]) -> None:
        """Add up what is held of the gates below a module; everything, if its name is empty.

        real_by_layer : of each layer that has attended in this batch, (B, T) bool, True for real tokens
        """
        waiting, self._waiting = self._waiting, []
        for name, values in waiting:
            if within and not name.startswith(f"{within}."):
                self._waiting.append((name, values))
                continue
            gate, running = self._running[name]
            values_BTHD = values.unsqueeze(-2) if gate.gate.site == "dense" else values
            layer = nearest_layer(name, real_by_layer)
            running.add(tokens_of(values_BTHD, None if layer is None else real_by_layer[layer]))

    def copy(self) -> GateWatch:
        """The same sums to go on with apart; what is held is no part of them."""
        twin = GateWatch()
        twin._running = {name: (gate, running.copy()) for name, (gate, running) in self._running.items()}
        return twin

    def summaries(self, layers: Iterable[str]) -> dict[str, dict[str, GateSummary]]:
        """By layer and site, each gate at the layer nearest to it."""
        names = list(layers)
        found: dict[str, dict[str, GateSummary]] = {name: {} for name in names}
        for name, (gate, running) in self._running.items():
            layer, summary = nearest_layer(name, names), running.summary()
            if layer is not None and summary is not None:
                found[layer][gate.gate.site] = summary
        return found


def nearest_layer(name: str, layers: Iterable[str]) -> str | None:
    """The layer whose path shares the most leading parts with a module's; the first of several, None of none."""
    return max(layers, key=lambda layer: _num_shared(name.split("."), layer.split(".")), default=None)


def tokens_of(x: Tensor, real_BT: Tensor | None) -> Tensor:
    """The tokens of (B, T, ...) that are real, all of them if it has no axes (B, T) of that size, as (tokens, ...)."""
    if real_BT is None or x.shape[:2] != real_BT.shape:
        return x.flatten(0, 1)
    return x[real_BT.to(x.device)]


def _num_shared(first: list[str], second: list[str]) -> int:
    num_shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_shared += 1
    return num_shared
