"""Sums that grow with what they describe and not with how often it is seen: moments, curves, spreads, ranks.

Adding makes new tensors and leaves the old as they are, so that a shallow copy keeps the sums as they were.

Legend: B batch, H heads, T query positions, N rows, M their width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.torch.observing.observation import Moments


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
        mean = _kept(values, counted).sum(dim=dims) / count.clamp(min=1)
        apart = values - _unreduced(mean, dims)
        squares = _kept(apart.square(), counted).sum(dim=dims)
        total = self.count + count
        share = count / total.clamp(min=1)
        step = mean - self.mean
        # A part without values has mean 0, share 0 and no squares: it changes nothing.
        self.squares = self.squares + squares + step.square() * self.count * share
        self.mean = self.mean + step * share
        self.count = total

    @property
    def std(self) -> Tensor:
        """Square root of the mean squared deviation; 0 where nothing, or a single value, was counted."""
        return (self.squares / self.count.clamp(min=1)).sqrt()


class RunningMoments:
    """One statistic of every head: spread, extremes and histogram."""

    def __init__(self, edges: Sequence[float], num_heads: int) -> None:
        self._inner_edges = torch.tensor(edges[1:-1], dtype=torch.float64)
        self._num_bins = len(edges) - 1
        self._spread = RunningSpread()
        self._low = torch.full((num_heads,), math.inf, dtype=torch.float64)
        self._high = torch.full((num_heads,), -math.inf, dtype=torch.float64)
        self._histogram = torch.zeros(num_heads, self._num_bins, dtype=torch.int64)

    def add(self, values_BHT: Tensor, counted_BHT: Tensor | None) -> None:
        """Take in the values of one call, in float64, where they are counted; None counts all."""
        if values_BHT.numel() == 0:
            return
        self._spread.add(values_BHT, counted_BHT, (0, 2))
        self._low = torch.minimum(self._low, _kept(values_BHT, counted_BHT, math.inf).amin(dim=(0, 2)))
        self._high = torch.maximum(self._high, _kept(values_BHT, counted_BHT, -math.inf).amax(dim=(0, 2)))
        bins = torch.bucketize(values_BHT, self._inner_edges, right=True)
        bins += self._num_bins * torch.arange(len(self._low))[:, None]
        # nan is in no bin.
        known = ~values_BHT.isnan() if counted_BHT is None else counted_BHT & ~values_BHT.isnan()
        chosen = bins.flatten() if bool(known.all()) else bins[known]
        new = torch.bincount(chosen, minlength=self._histogram.numel())
        self._histogram = self._histogram + new.view_as(self._histogram)

    def copy(self) -> RunningMoments:
        """The same sums to go on with apart."""
        twin = copy(self)
        twin._spread = copy(self._spread)
        return twin

    def moments(self) -> tuple[Moments, ...]:
        """What is known so far, one for each head."""
        columns = (self._spread.count, self._spread.mean, self._spread.std, self._low, self._high)
        numbers = zip(*(column.expand(len(self._low)).tolist() for column in columns), strict=True)
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
        stacked = torch.stack([_kept(values[name], counted_BHT).sum(dim=0) for name in self._names])
        counts = _count(values[self._names[0]], counted_BHT, (0,)).long()
        length = max(self._counts.shape[-1], first + counts.shape[-1])
        around = (first, length - first - counts.shape[-1])
        self._sums = F.pad(self._sums, (0, length - self._sums.shape[-1])) + F.pad(stacked, around)
        self._counts = F.pad(self._counts, (0, length - self._counts.shape[-1])) + F.pad(counts, around)

    def curves(self) -> tuple[tuple[int, ...], dict[str, tuple[tuple[float, ...], ...]]]:
        """The positions that every head has, and by statistic and head the mean at each of them."""
        present = (self._counts > 0).all(dim=0)
        means = (self._sums / self._counts.clamp(min=1))[..., present].tolist()
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
        if self._products is None or not bool(self._products.any()):
            return 0.0
        if not bool(self._products.isfinite().all()):
            return math.nan
        singular = torch.linalg.eigvalsh(self._products).clamp(min=0).sqrt()
        return float(torch.special.entr(singular / singular.sum()).sum().exp())


def _count(values: Tensor, counted: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """How many values there are over the axes, in float64."""
    if counted is not None:
        return counted.expand_as(values).sum(dim=dims).double()
    left = [size for dim, size in enumerate(values.shape) if dim not in dims]
    return torch.full(left, math.prod(values.shape[dim] for dim in dims), dtype=torch.float64)


def _kept(values: Tensor, counted: Tensor | None, instead: float = 0.0) -> Tensor:
    """The values that are counted, and another number in the place of the rest."""
    return values if counted is None else torch.where(counted, values, instead)


def _unreduced(reduced: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in sorted(dims):
        reduced = reduced.unsqueeze(dim)
    return reduced
