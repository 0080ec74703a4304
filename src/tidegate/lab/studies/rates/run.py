"""Which experts of a head can be estimated, and how fast, by where the gate stands?

One entry of one head with two experts, fitted to data from known experts at sample sizes up to a million; beside it,
what needs no data: flat directions of whole layers, and how much the function must change for an expert to err. Then
the limits: other starts, other truths, gates that nearly coincide, and more experts than there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tidegate._json import finite
from tidegate.experts import (
    ExpertExperiment,
    ExpertModel,
    ExpertTruth,
    Rate,
    VoronoiLoss,
    default_design,
    default_truth,
    estimate_rate,
    gauge_table,
    profile_modulus,
    run_experiment,
)
from tidegate.experts.models import Placement as Position
from tidegate.gate import PRESETS, legal_gates
from tidegate.lab.studies.rates.result import (
    Curve,
    GaugeCount,
    ModulusCurve,
    NearGates,
    OtherTruth,
    PositionRates,
    RateSettings,
    RatesResult,
    Slope,
    StartRadius,
    Surplus,
)
from tidegate.tensors.rotary import Rotary

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, biases": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "bias": True},
    "rotary, biases": {"rotary": Rotary(base=100.0), "head_dim": 4, "bias": True},
    "norms": {"qk_norm": True},
}
"""Options of `gauge_table`, over two heads of a model of width 6."""

QUICK = RateSettings(
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

_METRICS = ("expert", "regression", "scores")
_BAND = (0.1, 0.5, 0.9)
_MANY_STEPS = 1000
"""Steps of a fit with surplus experts, whose valleys are flat."""
_LEAST_DISTANCE = 1.0
"""Between the gates of truths that are drawn: what closer ones do is a question of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How far one part of the study is."""

    part: str
    item: str
    """What was just done."""
    done: int
    total: int


Tell: TypeAlias = Callable[[Step], None]
_Item = TypeVar("_Item")


def rates(settings: RateSettings | None = None, *, tell: Tell | None = None) -> RatesResult:
    """The whole study; the same settings give the same numbers.

    tell : called after each step of each part
    """
    chosen = RateSettings() if settings is None else settings
    told: Tell = (lambda _: None) if tell is None else tell
    return RatesResult(
        settings=chosen,
        rates=_rates(chosen, told),
        gauge=_gauge(chosen, told),
        modulus=_modulus(chosen, told),
        start_radius=_start_radius(chosen, told),
        near_gates=_near_gates(chosen, told),
        truths=_truths(chosen, told),
        surplus=_surplus(chosen, told),
    )


def _rates(settings: RateSettings, tell: Tell) -> tuple[PositionRates, ...]:
    found: list[PositionRates] = []
    for place, position in enumerate(settings.positions):

        def sized(done: int, sizes: int, place: int = place, position: str = position) -> None:
            item = f"{position}, n = {settings.ns[done - 1]:,}"
            total = sizes * len(settings.positions)
            tell(Step(part="rates", item=item, done=place * sizes + done, total=total))

        experiment = _experiment(settings, position)
        data = run_experiment(experiment, progress=sized)
        found.append(
            PositionRates(
                position=position,
                gated=experiment.model.gated_experts,
                num_parameters=experiment.model.num_parameters,
                rank=experiment.model.rank,
                slopes={metric: _slope(estimate_rate(data, metric)) for metric in _METRICS},
                errors={metric: _curve(settings.ns, data.errors[metric]) for metric in _METRICS}
                | {"start": _curve(settings.ns, data.start_error)},
            )
        )
    return tuple(found)


def _gauge(settings: RateSettings, tell: Tell) -> tuple[GaugeCount, ...]:
    """Every legal gate on the plain layer, those with names on the others."""
    named = ("none", *PRESETS)
    every = (*named, *(str(gate) for gate in legal_gates() if str(gate) not in PRESETS))
    asked = [(layout, gate) for layout in settings.layouts for gate in (every if layout == "plain" else named)]

    def count(layout: str, gate: str) -> GaugeCount:
        report = gauge_table([gate], seed=settings.seed, **LAYOUTS[layout])[0].report
        return GaugeCount(
            layout=layout,
            gate=gate,
            num_parameters=report.num_parameters,
            nullity=report.nullity,
            predicted=report.predicted,
            value_block=report.value_block_nullity,
            predicted_value_block=report.predicted_value_block,
            gap=finite(report.singular_gap),
        )

    return tuple(count(*item) for item in _told("flat directions", asked, tell))


def _modulus(settings: RateSettings, tell: Tell) -> tuple[ModulusCurve, ...]:
    def measure(position: Position) -> ModulusCurve:
        found = profile_modulus(ExpertModel(placement=position, k=2), default_truth(position))
        return ModulusCurve(
            position=position,
            radii=tuple(found.radii.tolist()),
            values=tuple(found.values.tolist()),
            exponent=finite(found.exponent),
        )

    return tuple(measure(position) for position in _told("modulus", settings.positions, tell))


def _start_radius(settings: RateSettings, tell: Tell) -> tuple[StartRadius, ...]:
    def measure(position: Position) -> StartRadius:
        errors = [
            run_experiment(_experiment(settings, position, ns=(settings.start_n,), radius=radius)).errors["expert"][0]
            for radius in settings.start_radii
        ]
        return StartRadius(position=position, error=_curve(settings.start_radii, np.stack(errors)))

    return tuple(measure(position) for position in _told("start radius", settings.positions, tell))


def _near_gates(settings: RateSettings, tell: Tell) -> tuple[NearGates, ...]:
    asked: list[tuple[Position, float]] = [
        (position, distance) for position in settings.gated_positions for distance in settings.gate_distances
    ]

    def measure(position: Position, distance: float) -> NearGates:
        truth = default_truth(position)
        apart = truth.gate[1] - truth.gate[0]
        second = truth.gate[0] + distance * apart / np.linalg.norm(apart)
        near = replace(truth, gate=np.stack([truth.gate[0], second]))
        # The experts of gates that nearly coincide run away from each other, some beyond all numbers.
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.filterwarnings("ignore", "Two true gates are")
            data = run_experiment(_smaller_experiment(settings, position, truth=near))
        error = float(np.median(data.errors["expert"][-1]))
        return NearGates(position=position, distance=distance, slope=_slope(estimate_rate(data)), error=error)

    return tuple(measure(*item) for item in _told("near gates", asked, tell))


def _truths(settings: RateSettings, tell: Tell) -> tuple[OtherTruth, ...]:
    asked: list[tuple[Position, int]] = [
        (position, number) for position in settings.positions for number in range(settings.num_truths)
    ]

    def measure(position: Position, number: int) -> OtherTruth:
        truth = _drawn_truth(position, np.random.default_rng([settings.seed, number]))
        design = default_design(seed=settings.seed + number + 1)
        data = run_experiment(_smaller_experiment(settings, position, truth=truth, design=design))
        return OtherTruth(position=position, number=number, slope=_slope(estimate_rate(data)))

    return tuple(measure(*item) for item in _told("other truths", asked, tell))


def _surplus(settings: RateSettings, tell: Tell) -> tuple[Surplus, ...]:
    if not settings.surplus:
        return ()
    kinds = (VoronoiLoss(kind="vector_mass"), VoronoiLoss(kind="raw"))
    asked: list[tuple[Position, VoronoiLoss]] = [
        (position, loss) for position in settings.gated_positions for loss in kinds
    ]

    def measure(position: Position, loss: VoronoiLoss) -> Surplus:
        experiment = _smaller_experiment(settings, position, k=2 + settings.surplus)
        data = run_experiment(experiment, loss=loss, max_steps=_MANY_STEPS)
        return Surplus(position=position, kind=loss.kind, slope=_slope(estimate_rate(data)))

    return tuple(measure(*item) for item in _told("surplus experts", asked, tell))


def _experiment(settings: RateSettings, position: Position, **options: Any) -> ExpertExperiment:
    common: dict[str, Any] = {name: getattr(settings, name) for name in _SHARED}
    return ExpertExperiment(placement=position, **(common | options))


_SHARED = ("ns", "replicates", "starts", "noise", "radius", "seed")


def _smaller_experiment(settings: RateSettings, position: Position, **options: Any) -> ExpertExperiment:
    """For a limit: the sizes that slopes are taken over, every second one if there are many, and fewer replicates."""
    large = [n for n in settings.ns if n >= 1000]
    ns = tuple(large[:: 2 if len(large) > 5 else 1])
    return _experiment(settings, position, ns=ns, replicates=settings.limit_replicates, **options)


def _drawn_truth(position: Position, rng: np.random.Generator) -> ExpertTruth:
    """Normal parameters of the default truth's size; gates, as they act on the input, at least 1 apart."""
    default, model = default_truth(position), ExpertModel(placement=position, k=2)
    while True:
        scores, experts, gate = (
            np.sqrt(np.mean(part**2) if part.size else 0.0) * rng.standard_normal(part.shape)
            for part in (default.scores, default.experts, default.gate)
        )
        # A gate that reads the query reads the input through the score matrix.
        acting = gate @ scores.T if position in ("bma", "bma-query") else gate
        if not model.gated_experts or np.linalg.norm(acting[0] - acting[1]) >= _LEAST_DISTANCE:
            return ExpertTruth(scores=scores, experts=experts, gate=gate)


def _told(part: str, items: Iterable[_Item], tell: Tell) -> Iterable[_Item]:
    """The items, with a word after each."""
    listed = list(items)
    for done, item in enumerate(listed, start=1):
        yield item
        words = item if isinstance(item, tuple) else (item,)
        tell(Step(part=part, item=", ".join(map(_word, words)), done=done, total=len(listed)))


def _word(value: Any) -> str:
    return value.kind if isinstance(value, VoronoiLoss) else str(value)


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


def _curve(x: tuple[float, ...], errors: Any) -> Curve:
    low, median, high = (tuple(row.tolist()) for row in np.quantile(errors, _BAND, axis=1))
    return Curve(x=tuple(map(float, x)), median=median, low=low, high=high)
