"""How the statistics of an observation are called on a page, and the small sums that its panels share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from tidegate._json import finite

if TYPE_CHECKING:
    from tidegate.torch.observing.observation import LayerObservation, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """One statistic of a head."""

    key: str
    """Its name in an observation."""
    name: str
    """In words, with its unit."""
    title: str
    """What it tells; `{keys}` stands for the key set."""
    digits: int = 3
    from_zero: bool = True
    """Whether 0 is the lower end of its colour scale."""


STATISTICS = (
    Statistic(key="mass", name="sink mass", title="Attention weight on {keys}"),
    Statistic(key="impact", name="sink impact", title="Share of {keys} in what heads take in"),
    Statistic(key="entropy", name="entropy (nats)", title="How widely heads look"),
    Statistic(key="effective_keys", name="effective keys", title="How many keys heads look at", digits=1),
    Statistic(key="mean_score", name="mean score", title="The mean score under the weights", from_zero=False),
    Statistic(key="max_score", name="largest score", title="The largest score of a query", from_zero=False),
    Statistic(key="heat_capacity", name="heat capacity", title="The variance of scores under the weights"),
)


def measured(observation: Observation) -> list[Statistic]:
    """The statistics that every layer has."""
    return [each for each in STATISTICS if all(each.key in layer.heads for layer in observation.layers)]


def head_means(layer: LayerObservation, key: str) -> tuple[float | None, ...]:
    """A statistic's mean, head by head; None where no query was counted or a number is not finite."""
    return tuple(finite(moments.mean) if moments.count else None for moments in layer.heads[key])


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is there and finite; None if nothing is."""
    known = [value for value in map(finite, values) if value is not None]
    return fmean(known) if known else None


def written(value: float | None) -> str:
    """A number with three digits, for a sentence."""
    return "nothing" if value is None else f"{value:.3g}"
