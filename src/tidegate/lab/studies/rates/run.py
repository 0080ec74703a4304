"""Estimate the experts of an attention head from data, by placement of the gate.

One entry of one head with two experts is fitted to data from known experts, at sample sizes up to a million. Two parts
need no data: the flat directions of whole layers, and the change of the function by the error of an expert. The limits
are other starts, other truths, gates that nearly coincide, and surplus experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tidegate._json import finite
from tidegate._validation import InputError
from tidegate.experts import (
    ExpertExperiment,
    ExpertModel,
    ExpertTruth,
    Rate,
    default_design,
    default_truth,
    estimate_rate,
    gauge_table,
    profile_modulus,
    run_experiment,
)
from tidegate.experts.models import PLACEMENTS, Placement
from tidegate.experts.voronoi import LossKind
from tidegate.gate import PRESETS, legal_gates
from tidegate.lab.studies.options import require_among, require_at_least
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.tensors.rotary import Rotary

_METRICS = ("expert", "regression", "scores")
_BAND = (0.1, 0.5, 0.9)
_MANY_STEPS = 1000
"""Maximum steps of a fit with surplus experts, whose objective has flat valleys."""
_VERDICTS = ("identified", "not identified", "inconclusive")
_LEAST_DISTANCE = 1.0
"""Minimum distance between the gates of random truths; closer gates are a separate part."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, biases": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "bias": True},
    "rotary, biases": {"rotary": Rotary(base=100.0), "head_dim": 4, "bias": True},
    "norms": {"qk_norm": True},
}
"""Layers whose flat directions are counted: options of `gauge_table`, by default two heads and width 6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesOptions:
    """All options of the experiments."""

    placements: tuple[Placement, ...] = PLACEMENTS
    ns: tuple[int, ...] = (100, 316, 1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
    """Sample sizes; slopes use those of at least 1000."""
    replicates: int = 96
    limit_replicates: int = 32
    """Replicates of the many experiments on limits."""
    starts: int = 4
    noise: float = 0.3
    radius: float = 0.2
    """Standard deviation of the starts around the truth, at every n."""
    seed: int = 0
    start_radii: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.4)
    start_n: int = 100_000
    """Sample size at which the radius of the starts is varied."""
    gate_distances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    """Distances between the two true gates; empty omits this part."""
    num_truths: int = 3
    """Number of additional random truths and designs."""
    surplus: int = 1
    """Number of fitted experts beyond the true ones; 0 omits this part."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Layers whose flat directions are counted; empty omits this part."""

    def __post_init__(self) -> None:
        require_among("placements", self.placements, PLACEMENTS)
        if self.layouts:
            require_among("layouts", self.layouts, tuple(LAYOUTS))
        require_at_least(self, seed=0, replicates=2, limit_replicates=2, starts=2, start_n=12, num_truths=0, surplus=0)
        # The parts that need these run last.
        if not self.start_radii or min(self.start_radii) <= 0:
            raise InputError("start_radii", expected="one or more positive numbers", got=self.start_radii)
        if min(self.gate_distances, default=1.0) <= 0:
            raise InputError("gate_distances", expected="positive numbers", got=self.gate_distances)
        if sum(n >= 1000 for n in self.ns) < 3:
            raise InputError("ns", expected="at least 3 sizes of 1000 or more, for a slope", got=self.ns)

    @property
    def gated_placements(self) -> tuple[Placement, ...]:
        """Return the placements with one gate per expert."""
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
"""The study in less than a minute, with wider intervals and without surplus experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """A `Rate` without its sample sizes."""

    slope: float
    low: float
    high: float
    verdict: str
    reasons: tuple[str, ...]
    converged: float
    spread_ratio: float | None
    """None if most starts had no equally good second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCurve:
    """Medians over replicates, with the central 80 %."""

    x: tuple[float, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRates:
    """Slopes and errors of one placement of the gate."""

    placement: str
    gated: bool
    num_parameters: int
    rank: int
    """Number of directions that the function depends on."""
    slopes: dict[str, Slope]
    """By metric: `expert`, `regression` and `scores`."""
    errors: dict[str, ErrorCurve]
    """By metric; `start` is the expert error of the winning start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugeCount:
    """Flat directions of one layer, measured and predicted."""

    layout: str
    gate: str
    num_parameters: int
    nullity: int
    predicted: int | None
    value_block: int
    predicted_value_block: int | None
    gap: float | None
    """Ratio of the smallest nonzero singular value to the largest zero one."""

    @property
    def agrees(self) -> bool:
        """Return whether prediction and measurement are equal."""
        return (self.nullity, self.value_block) == (self.predicted, self.predicted_value_block)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulusCurve:
    """Smallest change of the function by the error of an expert."""

    placement: str
    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float | None
    """None if the expert is not identified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRadius:
    """The expert error by the radius of the starts."""

    placement: str
    error: ErrorCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class NearGates:
    """The expert error where the two true gates are close."""

    placement: str
    distance: float
    slope: Slope
    error: float
    """Median expert error at the largest n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTruth:
    """The slope of the expert error for a random truth and design."""

    placement: str
    number: int
    slope: Slope


@dataclass(frozen=True, kw_only=True, slots=True)
class Surplus:
    """The slope of the expert error with more fitted than true experts."""

    placement: str
    kind: str
    """Kind of the loss, as in `voronoi_loss`."""
    slope: Slope


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesResult:
    """Rates by placement, identifiability without data, and the limits."""

    options: RatesOptions
    rates: tuple[PlacementRates, ...]
    gauge: tuple[GaugeCount, ...]
    modulus: tuple[ModulusCurve, ...]
    start_radius: tuple[StartRadius, ...]
    near_gates: tuple[NearGates, ...]
    truths: tuple[OtherTruth, ...]
    surplus: tuple[Surplus, ...]


def run_rates(options: RatesOptions, *, tell: Tell = ignore) -> RatesResult:
    """Run all parts of the study."""
    return RatesResult(
        options=options,
        rates=tuple(_rates(options, tell)),
        gauge=tuple(_gauge(options, tell)),
        modulus=tuple(_modulus(options, tell)),
        start_radius=tuple(_start_radius(options, tell)),
        near_gates=tuple(_near_gates(options, tell)),
        truths=tuple(_truths(options, tell)),
        surplus=tuple(_surplus(options, tell)) if options.surplus else (),
    )


def finding(result: RatesResult) -> str:
    """State the result in sentences."""
    by_verdict: dict[str, list[str]] = {}
    for found in result.rates:
        by_verdict.setdefault(found.slopes["expert"].verdict, []).append(found.placement)
    words = [f"{verdict} for {list_names(by_verdict[verdict])}" for verdict in _VERDICTS if verdict in by_verdict]
    regression = [found.slopes["regression"].slope for found in result.rates]
    agreeing = sum(count.agrees for count in result.gauge)
    return (
        f"The experts of a head are {', '.join(words)}. The regression error of the same fits has slopes from "
        f"{min(regression):.2f} to {max(regression):.2f}. The number of flat directions agrees with the prediction for "
        f"{agreeing} of {len(result.gauge)} layers."
    )


def list_names(names: Iterable[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, `a, b and c`."""
    listed = list(names)
    return " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _rates(options: RatesOptions, tell: Tell) -> Iterator[PlacementRates]:
    for placement in report_parts(options.placements, tell, work="rates"):
        experiment = _experiment(options, placement)
        data = run_experiment(experiment)
        errors = {metric: data.errors[metric] for metric in _METRICS} | {"start": data.start_error}
        yield PlacementRates(
            placement=placement,
            gated=experiment.model.gated_experts,
            num_parameters=experiment.model.num_parameters,
            rank=experiment.model.rank,
            slopes={metric: _slope(estimate_rate(data, metric)) for metric in _METRICS},
            errors={name: _curve(options.ns, each) for name, each in errors.items()},
        )


def _gauge(options: RatesOptions, tell: Tell) -> Iterator[GaugeCount]:
    """Count the flat directions of every legal gate on the plain layer, and of the presets on the others."""
    named = ("none", *PRESETS)
    # The theory makes no prediction for constant gates.
    readers = (str(gate) for gate in legal_gates() if gate.reads != "nothing")
    every = (*named, *(gate for gate in readers if gate not in PRESETS))
    cases = [(layout, gate) for layout in options.layouts for gate in (every if layout == "plain" else named)]
    for layout, gate in report_parts(cases, tell, work="flat directions", describe=_join):
        report = gauge_table([gate], seed=options.seed, **LAYOUTS[layout])[0].report
        yield GaugeCount(
            layout=layout,
            gate=gate,
            num_parameters=report.num_parameters,
            nullity=report.nullity,
            predicted=report.predicted,
            value_block=report.value_block_nullity,
            predicted_value_block=report.predicted_value_block,
            gap=finite(report.singular_gap),
        )


def _modulus(options: RatesOptions, tell: Tell) -> Iterator[ModulusCurve]:
    for placement in report_parts(options.placements, tell, work="modulus"):
        found = profile_modulus(ExpertModel(placement=placement, k=2), default_truth(placement))
        radii, values = tuple(found.radii.tolist()), tuple(found.values.tolist())
        yield ModulusCurve(placement=placement, radii=radii, values=values, exponent=finite(found.exponent))


def _start_radius(options: RatesOptions, tell: Tell) -> Iterator[StartRadius]:
    for placement in report_parts(options.placements, tell, work="start radius"):
        errors = [
            run_experiment(_experiment(options, placement, ns=(options.start_n,), radius=radius)).errors["expert"][0]
            for radius in options.start_radii
        ]
        yield StartRadius(placement=placement, error=_curve(options.start_radii, np.stack(errors)))


def _near_gates(options: RatesOptions, tell: Tell) -> Iterator[NearGates]:
    cases = list(product(options.gated_placements, options.gate_distances))
    for placement, distance in report_parts(cases, tell, work="near gates", describe=_join):
        truth = default_truth(placement)
        apart = truth.gate[1] - truth.gate[0]
        second = truth.gate[0] + distance * apart / np.linalg.norm(apart)
        near = replace(truth, gate=np.stack([truth.gate[0], second]))
        # The experts of gates that nearly coincide can diverge to infinity.
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.filterwarnings("ignore", "Two true gates are")
            data = run_experiment(_smaller_experiment(options, placement, truth=near))
        error = float(np.median(data.errors["expert"][-1]))
        yield NearGates(placement=placement, distance=distance, slope=_slope(estimate_rate(data)), error=error)


def _truths(options: RatesOptions, tell: Tell) -> Iterator[OtherTruth]:
    cases = list(product(options.placements, range(options.num_truths)))
    for placement, number in report_parts(cases, tell, work="other truths", describe=_join):
        truth = _draw_truth(placement, np.random.default_rng([options.seed, number]))
        design = default_design(seed=options.seed + number + 1)
        data = run_experiment(_smaller_experiment(options, placement, truth=truth, design=design))
        yield OtherTruth(placement=placement, number=number, slope=_slope(estimate_rate(data)))


def _surplus(options: RatesOptions, tell: Tell) -> Iterator[Surplus]:
    kinds: tuple[LossKind, ...] = ("vector_mass", "raw")
    cases = list(product(options.gated_placements, kinds))
    for placement, kind in report_parts(cases, tell, work="surplus experts", describe=_join):
        experiment = _smaller_experiment(options, placement, k=2 + options.surplus)
        data = run_experiment(experiment, loss=kind, max_steps=_MANY_STEPS)
        yield Surplus(placement=placement, kind=kind, slope=_slope(estimate_rate(data)))


def _experiment(options: RatesOptions, placement: Placement, **changes: Any) -> ExpertExperiment:
    shared = ("ns", "replicates", "starts", "noise", "radius", "seed")
    return ExpertExperiment(placement=placement, **({name: getattr(options, name) for name in shared} | changes))


def _smaller_experiment(options: RatesOptions, placement: Placement, **changes: Any) -> ExpertExperiment:
    """Make an experiment with fewer replicates and only sizes of at least 1000, every second one if there are many."""
    large = [n for n in options.ns if n >= 1000]
    ns = tuple(large[:: 2 if len(large) > 5 else 1])
    return _experiment(options, placement, ns=ns, replicates=options.limit_replicates, **changes)


def _draw_truth(placement: Placement, rng: np.random.Generator) -> ExpertTruth:
    """Draw normal parameters of the default truth's scale; the gates differ by at least 1 as functions of the input."""
    default, model = default_truth(placement), ExpertModel(placement=placement, k=2)
    while True:
        scores, experts, gate = (
            np.sqrt(np.mean(part**2) if part.size else 0.0) * rng.standard_normal(part.shape)
            for part in (default.scores, default.experts, default.gate)
        )
        # A gate that reads the query reads the input through the score matrix.
        acting = gate @ scores.T if placement in ("bma", "bma-query") else gate
        if not model.gated_experts or np.linalg.norm(acting[0] - acting[1]) >= _LEAST_DISTANCE:
            return ExpertTruth(scores=scores, experts=experts, gate=gate)


def _join(part: tuple[object, ...]) -> str:
    return ", ".join(map(str, part))


def _slope(rate: Rate) -> Slope:
    return Slope(
        slope=rate.slope,
        low=rate.interval[0],
        high=rate.interval[1],
        verdict=rate.verdict,
        reasons=rate.reasons,
        converged=rate.converged,
        spread_ratio=finite(rate.spread_ratio),
    )


def _curve(x: tuple[float, ...], errors: Any) -> ErrorCurve:
    low, median, high = (tuple(row.tolist()) for row in np.quantile(errors, _BAND, axis=1))
    return ErrorCurve(x=tuple(map(float, x)), median=median, low=low, high=high)
