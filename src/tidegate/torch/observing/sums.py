"""Running sums over the calls of a model; their size does not depend on the number of batches.

Adding creates new tensors and leaves the old ones unchanged, so that a shallow copy preserves the sums.

Legend: B batch, H heads, T positions, N rows or tokens, M their width, D gated width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Self

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

_MARGIN = 0.05
"""A gate this close to an end of its range is saturated."""
_ENDS: dict[Activation, tuple[float, float]] = {"sigmoid": (0.0, 1.0), "twosigmoid": (0.0, 2.0), "tanh1": (0.0, 2.0)}
"""The ranges of the bounded activations."""


class _Sums:
    """Sums that can be copied before a batch, to be restored if the batch fails."""

    def copy(self) -> Self:
        """Return an independent copy; tensors are shared until either adds to them."""
        copied = object.__new__(type(self))
        copied.__dict__ = _copy(self.__dict__)
        return copied


def _copy(value: Any) -> Any:
    if isinstance(value, _Sums):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


class RunningSpread(_Sums):
    """Running count, mean and squared deviations, elementwise in float64.

    Parts are merged by their own means and deviations, which avoids cancellation between large sums.
    """

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.float64)
        self.mean = torch.zeros((), dtype=torch.float64)
        self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor, counted: Tensor, dims: tuple[int, ...]) -> None:
        """Add values over the axes `dims`, where `counted`, which broadcasts to them, is True; on the CPU."""
        count = counted.expand_as(values).sum(dim=dims, keepdim=True).double()
        mean = torch.where(counted, values, 0).sum(dim=dims, keepdim=True) / count.clamp(min=1)
        squares = torch.where(counted, (values - mean).square(), 0).sum(dim=dims)
        count, mean = count.squeeze(dims), mean.squeeze(dims)
        total = self.count + count
        share = count / total.clamp(min=1)
        step = mean - self.mean
        # A part without values has mean 0, share 0 and squares 0: it changes nothing.
        self.squares = self.squares + squares + step.square() * self.count * share
        self.mean = self.mean + step * share
        self.count = total

    @property
    def std(self) -> Tensor:
        """Standard deviation of the values, divided by n; 0 for at most one value."""
        return (self.squares / self.count.clamp(min=1)).sqrt()


class RunningMoments(_Sums):
    """One statistic of every head: spread, extremes, and a histogram if there are edges."""

    def __init__(self, edges: Sequence[float], num_heads: int) -> None:
        self._inner_edges = torch.tensor(edges[1:-1], dtype=torch.float64)
        self._num_bins = max(len(edges) - 1, 0)
        self._spread = RunningSpread()
        self._low = torch.full((num_heads,), math.inf, dtype=torch.float64)
        self._high = torch.full((num_heads,), -math.inf, dtype=torch.float64)
        self._histogram = torch.zeros(num_heads, self._num_bins, dtype=torch.int64)

    def add(self, values_BHT: Tensor, counted_BHT: Tensor) -> None:
        """Add the values of one call, in float64, where they are counted."""
        if values_BHT.numel() == 0:
            return
        self._spread.add(values_BHT, counted_BHT, (0, 2))
        self._low = torch.minimum(self._low, torch.where(counted_BHT, values_BHT, math.inf).amin(dim=(0, 2)))
        self._high = torch.maximum(self._high, torch.where(counted_BHT, values_BHT, -math.inf).amax(dim=(0, 2)))
        if self._num_bins:
            bins = torch.bucketize(values_BHT, self._inner_edges, right=True)
            bins += self._num_bins * torch.arange(len(self._low))[:, None]
            # nan is in no bin.
            counts = torch.bincount(bins[counted_BHT & ~values_BHT.isnan()], minlength=self._histogram.numel())
            self._histogram = self._histogram + counts.view_as(self._histogram)

    def moments(self, unit: float = 1.0) -> tuple[Moments, ...]:
        """Return the moments of each head, of the values divided by a unit."""
        count = self._spread.count.expand(len(self._low))
        low, high = self._low.where(count > 0, 0), self._high.where(count > 0, 0)
        columns = ((column / unit).expand_as(low) for column in (self._spread.mean, self._spread.std, low, high))
        rows = torch.stack((count, *columns), dim=-1).tolist()
        return tuple(
            Moments(count=int(count), mean=mean, std=std, low=low, high=high, histogram=tuple(histogram))
            for (count, mean, std, low, high), histogram in zip(rows, self._histogram.tolist(), strict=True)
        )


class RunningPositions(_Sums):
    """Means by head and query position, for several statistics of the same queries."""

    def __init__(self, names: Sequence[str], num_heads: int) -> None:
        self._names = tuple(names)
        self._sums = torch.zeros(len(self._names), num_heads, 0, dtype=torch.float64)
        self._counts = torch.zeros(num_heads, 0, dtype=torch.int64)

    def add(self, values: dict[str, Tensor], counted_BHT: Tensor, first: int) -> None:
        """Add the values (B, H, T) of one call whose first query is at position `first`."""
        stacked = torch.stack([torch.where(counted_BHT, values[name], 0).sum(dim=0) for name in self._names])
        counts = counted_BHT.sum(dim=0)
        length = max(self._counts.shape[-1], first + counts.shape[-1])
        around = (first, length - first - counts.shape[-1])
        self._sums = F.pad(self._sums, (0, length - self._sums.shape[-1])) + F.pad(stacked, around)
        self._counts = F.pad(self._counts, (0, length - self._counts.shape[-1])) + F.pad(counts, around)

    def curves(self, unit: float = 1.0) -> tuple[tuple[int, ...], dict[str, tuple[tuple[float, ...], ...]]]:
        """Return the positions that all heads have, and the means there by statistic and head, divided by a unit."""
        present = (self._counts > 0).all(dim=0)
        means = (self._sums / self._counts.clamp(min=1) / unit)[..., present].tolist()
        curves = {name: tuple(map(tuple, by_head)) for name, by_head in zip(self._names, means, strict=True)}
        return tuple(present.nonzero().flatten().tolist()), curves


class RunningRank(_Sums):
    """Largest magnitude and effective rank of rows of one width, from their Gram matrix in float64."""

    def __init__(self) -> None:
        self.largest = 0.0
        """Largest magnitude so far."""
        self._products: Tensor | None = None

    def add(self, rows_NM: Tensor) -> None:
        """Add more rows."""
        if rows_NM.numel() == 0:
            return
        largest = float(rows_NM.abs().max())
        # Not `max`, which may drop a nan.
        self.largest = largest if math.isnan(largest) or largest > self.largest else self.largest
        rows = rows_NM.double()
        products = rows.mT @ rows
        self._products = products if self._products is None else self._products + products

    def effective_rank(self) -> float:
        """Return the effective rank of all rows; 0 for zeros, nan if a number is not finite."""
        return 0.0 if self._products is None else effective_rank(self._products)


def effective_rank(products_MM: Tensor) -> float:
    """Return the exponential of the entropy of a matrix's normalized singular values; 0 for zeros, nan if not finite.

    `products_MM` is the matrix's transpose times itself, in float64: its eigenvalues are the squared singular values.
    """
    if not bool(products_MM.any()):
        return 0.0
    if not bool(products_MM.isfinite().all()):
        return math.nan
    singular = torch.linalg.eigvalsh(products_MM).clamp(min=0).sqrt()
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


class RunningGate(_Sums):
    """One gate's mean, share below 0.1, saturation and spreads, in float64."""

    def __init__(self, activation: Activation) -> None:
        self._ends = _ENDS.get(activation)
        self._spread = RunningSpread()
        self._shares = RunningSpread()

    def add(self, values_NHD: Tensor) -> None:
        """Add the gate's values of some tokens."""
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

    def summary(self) -> GateSummary | None:
        """Return the summary of the gate; None if it has no values."""
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


class GateSums(_Sums):
    """The sums of all gates; a gate's values wait until its layer has attended, which determines padding."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[AttentionGate, RunningGate]] = {}
        self._waiting: list[tuple[str, Tensor]] = []

    def store(self, name: str, gate: AttentionGate, values: Tensor) -> None:
        """Store the result of a gate."""
        self._running.setdefault(name, (gate, RunningGate(gate.gate.activation)))
        self._waiting.append((name, values.detach()))

    def settle(self, within: str, real_by_layer: dict[str, Tensor]) -> None:
        """Add the stored values of the gates within a module, or of all gates if its name is empty.

        For each layer that has attended in this batch, (B, T) bool is True for real tokens.
        """
        waiting, self._waiting = self._waiting, []
        for name, values in waiting:
            if within and not name.startswith(f"{within}."):
                self._waiting.append((name, values))
                continue
            gate, running = self._running[name]
            values_BTHD = values.unsqueeze(-2) if gate.gate.site == "dense" else values
            layer = nearest_layer(name, real_by_layer)
            running.add(real_tokens(values_BTHD, None if layer is None else real_by_layer[layer]))

    def summaries(self, layers: Iterable[str]) -> dict[str, dict[str, GateSummary]]:
        """Return summaries by layer and site; a gate belongs to the nearest layer."""
        names = list(layers)
        found: dict[str, dict[str, GateSummary]] = {name: {} for name in names}
        for name, (gate, running) in self._running.items():
            layer, summary = nearest_layer(name, names), running.summary()
            if layer is not None and summary is not None:
                found[layer][gate.gate.site] = summary
        return found


def nearest_layer(name: str, layers: Iterable[str]) -> str | None:
    """Return the first layer whose path shares the most leading parts with a module's; None without layers."""

    def num_shared(layer: str) -> int:
        pairs = zip(name.split("."), layer.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(layers, key=num_shared, default=None)


def real_tokens(x: Tensor, real_BT: Tensor | None) -> Tensor:
    """Return the real tokens of (B, T, ...) as (tokens, ...); all of them if the mask is of another shape."""
    if real_BT is None or x.shape[:2] != real_BT.shape:
        return x.flatten(0, 1)
    return x[real_BT.to(x.device)]


class RunningContribution(_Sums):
    r"""The key set's contribution to a layer's output, by head, in units of that output.

    $|g_{ih} \odot \sum_{j \in J} A_{ijh} v_{jh}| \,/\, \sqrt{\sum_{h'} \langle |g_{ih'} \odot o_{ih'}|^2 \rangle_i}$:
    the mean in the denominator is over all queries that enter means.
    """

    def __init__(self, num_heads: int) -> None:
        self.known = True
        """Whether the output was known at every call."""
        self._moments = RunningMoments((), num_heads)
        self._positions = RunningPositions(("contribution",), num_heads)
        self._squared_output = RunningSpread()

    def add(self, set_output_BHTD: Tensor, output_BHTD: Tensor, call: CountedCall) -> None:
        """Add the heads' outputs of one call, from the key set and from all keys."""
        added = torch.linalg.vector_norm(set_output_BHTD, dim=-1).cpu().double()
        squares = torch.linalg.vector_norm(output_BHTD, dim=-1, dtype=wide_dtype(output_BHTD.dtype)).cpu().double() ** 2
        in_means, counted = call.in_means_BHT.cpu(), call.counted_BHT.cpu()
        self._moments.add(added, in_means)
        self._squared_output.add(squares, in_means, (0, 2))
        self._positions.add({"contribution": added}, counted, call.first)

    def summary(self) -> tuple[tuple[Moments, ...], tuple[tuple[float, ...], ...]] | None:
        """Return moments and curves by head; None if the output is unknown, or no query enters means."""
        if not self.known or not bool((self._squared_output.count > 0).any()):
            return None
        # In a layer whose output is 0, every key contributes 0.
        unit = float(self._squared_output.mean.sum().sqrt()) or 1.0
        return self._moments.moments(unit), self._positions.curves(unit)[1]["contribution"]


class LayerRecord(_Sums):
    """The running sums of one layer's statistics, by head and by query position."""

    def __init__(self, name: str, num_heads: int, statistics: Sequence[str]) -> None:
        self.name = name
        self.num_heads = num_heads
        self.past: Past | None = None
        """The state after the last call, to recognize the next one."""
        self._moments = {statistic: RunningMoments(HISTOGRAM_EDGES[statistic], num_heads) for statistic in statistics}
        self._positions = RunningPositions(statistics, num_heads)
        self.contribution = RunningContribution(num_heads)

    def add(self, call: CountedCall) -> None:
        """Add one attention call of the layer; means leave out queries that may see only one key."""
        self.past = call.past
        values = {name: getattr(call.statistics, name).cpu().double() for name in self._moments}
        in_means = call.in_means_BHT.cpu()
        for name, moments in self._moments.items():
            moments.add(values[name], in_means)
        self._positions.add(values, call.counted_BHT.cpu(), call.first)

    def observation(self, gates: dict[str, GateSummary], residual: ResidualSummary | None) -> LayerObservation:
        """Return the sums as plain data."""
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


class Tally(_Sums):
    """The sums of layers, gates and residual streams, and the number of batches."""

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], LayerRecord] = {}
        """By name and number of heads."""
        self.layers_in: dict[str, list[str]] = {}
        """The layers in each block."""
        self.streams: dict[str, RunningRank] = {}
        self.gates = GateSums()
        self.num_batches = 0
