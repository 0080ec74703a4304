"""Options and result of the study of rates, as plain data that go through JSON and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidegate._validation import InputError
from tidegate.experts.models import PLACEMENTS, ExpertModel, Placement
from tidegate.lab.studies.options import require_among, require_at_least
from tidegate.tensors.rotary import Rotary

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, biases": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "bias": True},
    "rotary, biases": {"rotary": Rotary(base=100.0), "head_dim": 4, "bias": True},
    "norms": {"qk_norm": True},
}
"""Layers whose flat directions are counted: options of `gauge_table`, over two heads of a model of width 6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesOptions:
    """Everything that the study's numbers depend on."""

    placements: tuple[Placement, ...] = PLACEMENTS
    ns: tuple[int, ...] = (100, 316, 1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
    """Sample sizes; slopes are taken over those of 1000 and more."""
    replicates: int = 96
    limit_replicates: int = 32
    """In the experiments on limits, of which there are many."""
    starts: int = 4
    noise: float = 0.3
    radius: float = 0.2
    """Of the starts around the truth, at every n."""
    seed: int = 0
    start_radii: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.4)
    start_n: int = 100_000
    """Sample size at which the starts' radius is varied."""
    gate_distances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    """Between the two true gates; empty leaves this part out."""
    num_truths: int = 3
    """Further truths and designs, drawn at random."""
    surplus: int = 1
    """Experts that are fitted beyond those that there are; 0 leaves this part out."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Layers whose flat directions are counted; empty leaves this part out."""

    def __post_init__(self) -> None:
        require_among("placements", self.placements, PLACEMENTS)
        if self.layouts:
            require_among("layouts", self.layouts, tuple(LAYOUTS))
        require_at_least(self, seed=0, replicates=2, limit_replicates=2, starts=2, num_truths=0, surplus=0)
        if sum(n >= 1000 for n in self.ns) < 3:
            raise InputError("ns", expected="at least 3 sizes of 1000 or more, for a slope", got=self.ns)

    @property
    def gated_placements(self) -> tuple[Placement, ...]:
        """Those where each expert has a gate of its own."""
        return tuple(placement for placement in self.placements if ExpertModel(placement=placement, k=2).gated_experts)


QUICK = RatesOptions(
    ns=(1_000, 10_000, 100_000, 1_000_000),
    replicates=32,
    limit_replicates=24,
    starts=3,
    start_radii=(0.05, 0.2),
    gate_distances=(0.05, 0.4),
    num_truths=1,
    surplus=0,
    layouts=("plain",),
)
"""The same questions in less than a minute; intervals are wider, and surplus experts are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """A `Rate`, without its sizes."""

    slope: float
    low: float
    high: float
    verdict: str
    reasons: tuple[str, ...]
    converged: float
    spread_ratio: float | None
    """None where most starts had no equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCurve:
    """Medians over replicates, and the band that holds 80 % of them."""

    x: tuple[float, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRates:
    """One placement of the gate: slopes and errors by metric."""

    placement: str
    gated: bool
    num_parameters: int
    rank: int
    """Directions that the function depends on."""
    slopes: dict[str, Slope]
    """Of `expert`, `regression` and `scores`."""
    errors: dict[str, ErrorCurve]
    """The same, and `start`: the expert error of the start that won."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugeCount:
    """Flat directions of one layer, counted and predicted."""

    layout: str
    gate: str
    num_parameters: int
    nullity: int
    predicted: int | None
    value_block: int
    predicted_value_block: int | None
    gap: float | None
    """Smallest singular value that counts over the largest that does not."""

    @property
    def agrees(self) -> bool:
        """Whether theory and measurement are the same."""
        return (self.nullity, self.value_block) == (self.predicted, self.predicted_value_block)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulusCurve:
    """How much the function must change for a given error of an expert."""

    placement: str
    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float | None
    """None where the expert is not identified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRadius:
    """The expert error by how far from the truth fits began."""

    placement: str
    error: ErrorCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class NearGates:
    """What is left of the advantage where the two true gates are close."""

    placement: str
    distance: float
    slope: Slope
    error: float
    """Median expert error at the largest n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTruth:
    """The expert error's slope for a truth and a design that were drawn at random."""

    placement: str
    number: int
    slope: Slope


@dataclass(frozen=True, kw_only=True, slots=True)
class Surplus:
    """The expert error's slope where more experts are fitted than there are."""

    placement: str
    kind: str
    """Of the loss: masses summed over each cell, or single ones."""
    slope: Slope


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesResult:
    """The answer: rates by placement, what needs no data, and the limits."""

    options: RatesOptions
    rates: tuple[PlacementRates, ...]
    gauge: tuple[GaugeCount, ...]
    modulus: tuple[ModulusCurve, ...]
    start_radius: tuple[StartRadius, ...]
    near_gates: tuple[NearGates, ...]
    truths: tuple[OtherTruth, ...]
    surplus: tuple[Surplus, ...]
