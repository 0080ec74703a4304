"""All that is kept of one attention layer while it is watched; its size does not depend on how often it is called."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from tidegate.torch.observing.counting import CountedCall
from tidegate.torch.observing.observation import HISTOGRAM_EDGES, GateSummary, LayerObservation, ResidualSummary
from tidegate.torch.observing.past import Past
from tidegate.torch.observing.running import RunningMoments, RunningPositions

STATISTICS = ("entropy", "effective_keys", "mass", "impact", "mean_score")
STATISTICS_WITH_HEAT = (*STATISTICS, "max_score", "heat_capacity")


class LayerRecord:
    """The running sums of one layer's statistics, by head and by query position."""

    def __init__(self, name: str, num_heads: int, statistics: Sequence[str]) -> None:
        self.name = name
        self.num_heads = num_heads
        self.past: Past | None = None
        """What the next call may go on from."""
        self._moments = {statistic: RunningMoments(HISTOGRAM_EDGES[statistic], num_heads) for statistic in statistics}
        self._positions = RunningPositions(statistics, num_heads)

    def add(self, call: CountedCall) -> None:
        """Take in one attention call of the layer."""
        self.past = call.past
        counted = call.counted_BHT.cpu()
        # Most calls have no padding, and need no looking up.
        counted = None if bool(counted.all()) else counted
        values = {name: getattr(call.statistics, name).cpu().double() for name in self._moments}
        for name, moments in self._moments.items():
            moments.add(values[name], counted)
        self._positions.add(values, counted, call.first)

    def copy(self) -> LayerRecord:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._moments = {name: moments.copy() for name, moments in self._moments.items()}
        twin._positions = copy(self._positions)
        return twin

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
