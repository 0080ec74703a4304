"""All sums of a model that is watched, which a batch that breaks off must leave as they were."""

from __future__ import annotations

from copy import copy

from tidegate.torch.observing.gate_watch import GateWatch
from tidegate.torch.observing.layer_record import LayerRecord
from tidegate.torch.observing.running import RunningRank


class Tally:
    """The sums of layers, gates and residual streams, and how many batches they are of."""

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], LayerRecord] = {}
        """By name and number of heads."""
        self.layers_in: dict[str, list[str]] = {}
        """The layers in each block."""
        self.streams: dict[str, RunningRank] = {}
        self.gates = GateWatch()
        self.num_batches = 0

    def copy(self) -> Tally:
        """The same sums to go on with apart; tensors are shared until one of the two adds to them."""
        twin = copy(self)
        twin.layers = {key: record.copy() for key, record in self.layers.items()}
        twin.layers_in = {block: list(layers) for block, layers in self.layers_in.items()}
        twin.streams = {block: copy(stream) for block, stream in self.streams.items()}
        twin.gates = self.gates.copy()
        return twin
