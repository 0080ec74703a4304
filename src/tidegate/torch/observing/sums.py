"""Sums that are kept while a model runs: they grow with what they describe, not with how often it is seen.

Adding makes new tensors and leaves the old as they are, so that a shallow copy keeps the sums as they were.

Legend: B batch, H heads, T positions, N rows or tokens, M their width, D gated width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.gate import Activation
from tidegate.torch.gate import AttentionGate
from tidegate.torch.observing.counting import CountedCall, Past
from tidegate.torch.observing.observation import (
    CLOSED_BELOW,
    HISTOGRAM_EDGES,
    GateSummary,
    LayerObservation,
    Moments,
    ResidualSummary,
)
from tidegate.torch.precision import wide_dtype

STATISTICS = ("entropy", "effective_keys", "mass", "impact", "mean_score")
STATISTICS_WITH_HEAT = (*STATISTICS, "max_score", "heat_capacity")

_MARGIN = 0.05
"""A gate this close to an end of its range is saturated."""
_ENDS: dict[Activation, tuple[float, float]] = {"sigmoid": (0.0, 1.0), "twosigmoid": (0.0, 2.0), "tanh1": (0.0, 2.0)}
"""The ranges of the activations that have two ends; the others grow without bound."""


class RunningSpread:
    """Count, mean and squared deviations of each of several numbers, part after part, in float64.

    Parts are merged by their own means and deviations, so that no large sums are subtracted from each other.
    """

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.float64)
        self.mean = torch.zeros((), dtype=torch.float64)
        self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor, counted: Tensor | None, dims: tuple[int, ...]) -> None:
        """Take in values over the axes `dims`, those where `counted` is True, or all; both of one shape, on the CPU."""
        count = _count(values, counted, dims)
        mean = _where_counted(values, counted).sum(dim=dims) / count.clamp(min=1)
        apart = values - _unsqueeze_all(mean, dims)
        squares = _where_counted(apart.square(), counted).sum(dim=dims)
        total = self.count + count
        share = count / total.clamp(min=1)
        step = mean - self.mean
        # A part without values has mean 0, share 0 and no squares: it changes nothing.
        self.squares = self.squares + squares + step.square() * self.count * share
        self.mean = self.mean + step * share
        self.count = total

    @property
    def std(self) -> Tensor:
        """Square root of the mean squared deviation; 0 where nothing, or a single value, was counted.

        Divided by n, not by n - 1: it describes the values that were seen and estimates nothing beyond them, and a
        single value has a spread.
        """
        return (self.squares / self.count.clamp(min=1)).sqrt()


class RunningMoments:
    """One statistic of every head: spread, extremes and histogram, which has no bins if there are no edges."""

    def __init__(self, edges: Sequence[float], num_heads: int) -> None:
        self._inner_edges = torch.tensor(edges[1:-1], dtype=torch.float64)
        self._num_bins = max(len(edges) - 1, 0)
        self._spread = RunningSpread()
        self._low = torch.full((num_heads,), math.inf, dtype=torch.float64)
        self._high = torch.full((num_heads,), -math.inf, dtype=torch.float64)
        self._histogram = torch.zeros(num_heads, self._num_bins, dtype=torch.int64)

    def add(self, values_BHT: Tensor, counted_BHT: Tensor | None) -> None:
        """Take in the values of one call, in float64, where they are counted; None counts all."""
        if values_BHT.numel() == 0:
            return
        self._spread.add(values_BHT, counted_BHT, (0, 2))
        self._low = torch.minimum(self._low, _where_counted(values_BHT, counted_BHT, math.inf).amin(dim=(0, 2)))
        self._high = torch.maximum(self._high, _where_counted(values_BHT, counted_BHT, -math.inf).amax(dim=(0, 2)))
        if self._num_bins:
            self._histogram = self._histogram + self._bin_counts(values_BHT, counted_BHT)

    def _bin_counts(self, values_BHT: Tensor, counted_BHT: Tensor | None) -> Tensor:
        bins = torch.bucketize(values_BHT, self._inner_edges, right=True)
        bins += self._num_bins * torch.arange(len(self._low))[:, None]
        # nan is in no bin.
        known = ~values_BHT.isnan() if counted_BHT is None else counted_BHT & ~values_BHT.isnan()
        chosen = bins.flatten() if bool(known.all()) else bins[known]
        return torch.bincount(chosen, minlength=self._histogram.numel()).view_as(self._histogram)

    def copy(self) -> RunningMoments:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._spread = copy(self._spread)
        return twin

    def moments(self, unit: float = 1.0) -> tuple[Moments, ...]:
        """What is known so far, one for each head, the values divided by a unit."""
        columns = (self._spread.mean, self._spread.std, self._low, self._high)
        count = self._spread.count.expand(len(self._low)).tolist()
        numbers = zip(count, *((column / unit).expand(len(self._low)).tolist() for column in columns), strict=True)
        return tuple(
            Moments(
                count=int(count),
                mean=mean,
                std=std,
                low=low if count else 0.0,
                high=high if count else 0.0,
                histogram=tuple(histogram),
            )
            for (count, mean, std, low, high), histogram in zip(numbers, self._histogram.tolist(), strict=True)
        )


class RunningPositions:
    """Means of every head by query position, for several statistics that are counted alike."""

    def __init__(self, names: Sequence[str], num_heads: int) -> None:
        self._names = tuple(names)
        self._sums = torch.zeros(len(self._names), num_heads, 0, dtype=torch.float64)
        self._counts = torch.zeros(num_heads, 0, dtype=torch.int64)

    def add(self, values: dict[str, Tensor], counted_BHT: Tensor | None, first: int) -> None:
        """Take in the values (B, H, T) of one call whose first query is at position `first`."""
        stacked = torch.stack([_where_counted(values[name], counted_BHT).sum(dim=0) for name in self._names])
        counts = _count(values[self._names[0]], counted_BHT, (0,)).long()
        length = max(self._counts.shape[-1], first + counts.shape[-1])
        around = (first, length - first - counts.shape[-1])
        self._sums = F.pad(self._sums, (0, length - self._sums.shape[-1])) + F.pad(stacked, around)
        self._counts = F.pad(self._counts, (0, length - self._counts.shape[-1])) + F.pad(counts, around)

    def curves(self, unit: float = 1.0) -> tuple[tuple[int, ...], dict[str, tuple[tuple[float, ...], ...]]]:
        """The positions that every head has, and by statistic and head the mean at each of them, divided by a unit."""
        present = (self._counts > 0).all(dim=0)
        means = (self._sums / self._counts.clamp(min=1) / unit)[..., present].tolist()
        by_name = {name: tuple(map(tuple, by_head)) for name, by_head in zip(self._names, means, strict=True)}
        return tuple(present.nonzero().flatten().tolist()), by_name


class RunningRank:
    """Largest magnitude and effective rank of rows of one width, by the matrix of their products in float64."""

    def __init__(self) -> None:
        self._largest = 0.0
        self._products: Tensor | None = None

    def add(self, rows_NM: Tensor) -> None:
        """Take in more rows."""
        if rows_NM.numel() == 0:
            return
        largest = float(rows_NM.abs().max())
        # Not `max`, which may lose a nan.
        self._largest = largest if math.isnan(largest) or largest > self._largest else self._largest
        rows = rows_NM.double()
        products = rows.mT @ rows
        self._products = products if self._products is None else self._products + products

    @property
    def largest(self) -> float:
        """Largest magnitude so far."""
        return self._largest

    def effective_rank(self) -> float:
        """Exponential of the entropy of the normalised singular values; 0 for zeros, nan if not all is finite."""
        return 0.0 if self._products is None else effective_rank(self._products)


def effective_rank(products_MM: Tensor) -> float:
    """Return the exponential of the entropy of a matrix's normalised singular values, from its products in float64.

    products_MM : the matrix times its transpose, whose eigenvalues are the squares of its singular values
    returns     : 0 for zeros, which make use of no direction; nan if not all is finite
    """
    if not bool(products_MM.any()):
        return 0.0
    if not bool(products_MM.isfinite().all()):
        return math.nan
    singular = torch.linalg.eigvalsh(products_MM).clamp(min=0).sqrt()
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


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
        self._shares.add(torch.stack((values < CLOSED_BELOW, saturated)).double(), counted, (1, 3))

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


class RunningContribution:
    r"""What the key set adds to a layer's output, head by head, in units of that output.

    $|g_{ih} \odot \sum_{j \in J} A_{ijh} v_{jh}| \,/\, \sqrt{\sum_{h'} \langle |g_{ih'} \odot o_{ih'}|^2 \rangle_i}$:
    the mean in the denominator is over all queries that count in means.
    """

    def __init__(self, num_heads: int) -> None:
        self.known = True
        """Whether the output was seen at every call."""
        self._moments = RunningMoments((), num_heads)
        self._positions = RunningPositions(("contribution",), num_heads)
        self._squared_output = RunningSpread()

    def add(self, set_output_BHTD: Tensor, output_BHTD: Tensor, call: CountedCall) -> None:
        """Take in what one call handed on: from the key set, and from all keys."""
        added = torch.linalg.vector_norm(set_output_BHTD, dim=-1).cpu().double()
        squares = torch.linalg.vector_norm(output_BHTD, dim=-1, dtype=wide_dtype(output_BHTD.dtype)).cpu().double() ** 2
        in_means, counted = call.in_means_BHT.cpu(), call.counted_BHT.cpu()
        self._moments.add(added, in_means)
        self._squared_output.add(squares, in_means, (0, 2))
        self._positions.add({"contribution": added}, counted, call.first)

    def copy(self) -> RunningContribution:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._moments, twin._positions = self._moments.copy(), copy(self._positions)
        twin._squared_output = copy(self._squared_output)
        return twin

    def summary(self) -> tuple[tuple[Moments, ...], tuple[tuple[float, ...], ...]] | None:
        """By head, moments and curve; None if the output was not seen, or no query counts in means."""
        if not self.known or not bool((self._squared_output.count > 0).any()):
            return None
        # A layer that hands nothing on has a contribution of 0 from every key.
        unit = float(self._squared_output.mean.sum().sqrt()) or 1.0
        return self._moments.moments(unit), self._positions.curves(unit)[1]["contribution"]


class LayerRecord:
    """The running sums of one layer's statistics, by head and by query position."""

    def __init__(self, name: str, num_heads: int, statistics: Sequence[str]) -> None:
        self.name = name
        self.num_heads = num_heads
        self.past: Past | None = None
        """What the next call may go on from."""
        self._moments = {statistic: RunningMoments(HISTOGRAM_EDGES[statistic], num_heads) for statistic in statistics}
        self._positions = RunningPositions(statistics, num_heads)
        self.contribution = RunningContribution(num_heads)

    def add(self, call: CountedCall) -> None:
        """Take in one attention call of the layer; means leave out the queries that may see a single key."""
        self.past = call.past
        values = {name: getattr(call.statistics, name).cpu().double() for name in self._moments}
        in_means = _unless_all(call.in_means_BHT.cpu())
        for name, moments in self._moments.items():
            moments.add(values[name], in_means)
        self._positions.add(values, _unless_all(call.counted_BHT.cpu()), call.first)

    def copy(self) -> LayerRecord:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._moments = {name: moments.copy() for name, moments in self._moments.items()}
        twin._positions = copy(self._positions)
        twin.contribution = self.contribution.copy()
        return twin

    def observation(self, gates: dict[str, GateSummary], residual: ResidualSummary | None) -> LayerObservation:
        """The sums as plain data."""
        positions, by_position = self._positions.curves()
        heads = {name: moments.moments() for name, moments in self._moments.items()}
        if (contribution := self.contribution.summary()) is not None:
            heads["contribution"], by_position["contribution"] = contribution
        return LayerObservation(
            name=self.name,
            num_heads=self.num_heads,
            heads=heads,
            positions=positions,
            by_position=by_position,
            gates=gates,
            residual=residual,
        )


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


def _unless_all(counted: Tensor) -> Tensor | None:
    """Which values count; None if all do, which needs no looking up."""
    return None if bool(counted.all()) else counted


def _count(values: Tensor, counted: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """How many values there are over the axes, in float64."""
    if counted is not None:
        return counted.expand_as(values).sum(dim=dims).double()
    left = [size for dim, size in enumerate(values.shape) if dim not in dims]
    return torch.full(left, math.prod(values.shape[dim] for dim in dims), dtype=torch.float64)


def _where_counted(values: Tensor, counted: Tensor | None, instead: float = 0.0) -> Tensor:
    """Return the values, with `instead` where they are not counted."""
    return values if counted is None else torch.where(counted, values, instead)


def _unsqueeze_all(reduced: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in sorted(dims):
        reduced = reduced.unsqueeze(dim)
    return reduced
