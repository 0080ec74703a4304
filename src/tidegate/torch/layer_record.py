"""All that is kept of one attention layer while it is watched; its size does not depend on how often it is called."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tidegate.torch.counting import CountedCall
from tidegate.torch.observation import HISTOGRAM_EDGES, GateSummary, LayerObservation, ResidualSummary
from tidegate.torch.running import RunningMoments, RunningPositions

__all__ = ["STATISTICS", "STATISTICS_WITH_HEAT", "LayerRecord"]

STATISTICS = ("entropy", "effective_keys", "mass", "impact", "mean_score")
STATISTICS_WITH_HEAT = (*STATISTICS, "max_score", "heat_capacity")


class LayerRecord:
    """The running sums of one layer's statistics, by head and by query position."""

    def __init__(self, name: str, num_heads: int, statistics: Sequence[str]) -> None:
        self.name = name
        self.num_heads = num_heads
        self.real_BT: Tensor | None = None
        """Which queries of the last call are no padding."""
        self._moments = {statistic: RunningMoments(HISTOGRAM_EDGES[statistic], num_heads) for statistic in statistics}
        self._positions = RunningPositions(statistics, num_heads)

    def add(self, call: CountedCall) -> None:
        """Take in one attention call of the layer."""
        self.real_BT = call.real_BT
        counted = call.counted_BHT.cpu()
        values = {name: getattr(call.statistics, name).cpu().double() for name in self._moments}
        for name, moments in self._moments.items():
            moments.add(values[name], counted)
        self._positions.add(values, counted, call.first)

    def observation(self, gates: dict[str, GateSummary], residual: ResidualSummary | None) -> LayerObservation:
        """The sums as plain data."""
        positions, by_position = self._positions.curves()
        return LayerObservation(
            name=self.name,
            num_heads=self.num_heads,
            heads={name: moments.moments() for name, moments in self._moments.items()},
            positions=positions,
            by_position=by_position,
            gates=gates,
            residual=residual,
        )
