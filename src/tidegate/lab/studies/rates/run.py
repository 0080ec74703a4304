"""Which experts of a head can be estimated, and how fast, by where the gate stands?

One entry of one head with two experts, fitted to data from known experts at sample sizes up to a million; beside it,
what needs no data: flat directions of whole layers, and how much the function must change for an expert to err. Then
the limits: other starts, other truths, gates that nearly coincide, and more experts than there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from tidegate._json import finite
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
from tidegate.experts.models import Placement
from tidegate.experts.voronoi import LossKind
from tidegate.gate import PRESETS, legal_gates
from tidegate.lab.studies.rates.result import (
    LAYOUTS,
    ErrorCurve,
    GaugeCount,
    ModulusCurve,
    NearGates,
    OtherTruth,
    PlacementRates,
    RatesOptions,
    RatesResult,
    Slope,
    StartRadius,
    Surplus,
)
from tidegate.lab.training.events import PartsDone, Tell, ignore, report_parts

_METRICS = ("expert", "regression", "scores")
_BAND = (0.1, 0.5, 0.9)
_MANY_STEPS = 1000
"""Steps of a fit with surplus experts, whose valleys are flat."""
_VERDICTS = ("identified", "not identified", "inconclusive")
_LEAST_DISTANCE = 1.0
"""Between the gates of truths that are drawn: what closer ones do is a question of its own."""


def run_rates(options: RatesOptions, *, tell: Tell = ignore) -> RatesResult:
    """Fit, count and measure all that the study asks for; the same options give the same numbers."""
    return RatesResult(
        options=options,
        rates=_rates(options, tell),
        gauge=_gauge(options, tell),
        modulus=_modulus(options, tell),
        start_radius=_start_radius(options, tell),
        near_gates=_near_gates(options, tell),
        truths=_truths(options, tell),
        surplus=_surplus(options, tell),
    )


def finding(result: RatesResult) -> str:
    """Say what holds, from the numbers."""
    by_verdict: dict[str, list[str]] = {}
    for found in result.rates:
        by_verdict.setdefault(found.slopes["expert"].verdict, []).append(found.placement)
    words = [f"{verdict} for {list_names(by_verdict[verdict])}" for verdict in _VERDICTS if verdict in by_verdict]
    regression = [found.slopes["regression"].slope for found in result.rates]
    agreeing = sum(count.agrees for count in result.gauge)
    return (
        f"The experts of a head are {', '.join(words)}. The regression error of the same fits falls with slopes from "
        f"{min(regression):.2f} to {max(regression):.2f}. Flat directions are as many as predicted for {agreeing} of "
        f"{len(result.gauge)} layers."
    )


def list_names(names: Iterable[str]) -> str:
    """Join names as in a sentence: `a`, `a and b`, `a, b and c`; empty for none."""
    listed = list(names)
    return " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _rates(options: RatesOptions, tell: Tell) -> tuple[PlacementRates, ...]:
    num_sizes = len(options.ns)
    found: list[PlacementRates] = []
    tell(PartsDone(work="rates", done=0, total=num_sizes * len(options.placements)))
    for place, placement in enumerate(options.placements):

        def report_size(done: int, _: int, place: int = place, placement: str = placement) -> None:
            item = f"{placement}, n = {options.ns[done - 1]:,}"
            total = num_sizes * len(options.placements)
            tell(PartsDone(work="rates", done=place * num_sizes + done, total=total, item=item))

        experiment = _experiment(options, placement)
        data = run_experiment(experiment, progress=report_size)
        found.append(
            PlacementRates(
                placement=placement,
                gated=experiment.model.gated_experts,
                num_parameters=experiment.model.num_parameters,
                rank=experiment.model.rank,
                slopes={metric: _slope(estimate_rate(data, metric)) for metric in _METRICS},
                errors={metric: _curve(options.ns, data.errors[metric]) for metric in _METRICS}
                | {"start": _curve(options.ns, data.start_error)},
            )
        )
    return tuple(found)


def _gauge(options: RatesOptions, tell: Tell) -> tuple[GaugeCount, ...]:
    """Every legal gate on the plain layer, those with names on the others."""
    named = ("none", *PRESETS)
    # The theory is silent on constants, which are no experts' gates.
    readers = (str(gate) for gate in legal_gates() if gate.reads != "nothing")
    every = (*named, *(gate for gate in readers if gate not in PRESETS))
    asked = [(layout, gate) for layout in options.layouts for gate in (every if layout == "plain" else named)]
    counts: list[GaugeCount] = []
    for layout, gate in report_parts(asked, tell, work="flat directions", describe=_join):
        report = gauge_table([gate], seed=options.seed, **LAYOUTS[layout])[0].report
        counts.append(
            GaugeCount(
                layout=layout,
                gate=gate,
                num_parameters=report.num_parameters,
                nullity=report.nullity,
                predicted=report.predicted,
                value_block=report.value_block_nullity,
                predicted_value_block=report.predicted_value_block,
                gap=finite(report.singular_gap),
            )
        )
    return tuple(counts)


def _modulus(options: RatesOptions, tell: Tell) -> tuple[ModulusCurve, ...]:
    curves: list[ModulusCurve] = []
    for placement in report_parts(options.placements, tell, work="modulus"):
        found = profile_modulus(ExpertModel(placement=placement, k=2), default_truth(placement))
        radii, values = tuple(found.radii.tolist()), tuple(found.values.tolist())
        curves.append(ModulusCurve(placement=placement, radii=radii, values=values, exponent=finite(found.exponent)))
    return tuple(curves)


def _start_radius(options: RatesOptions, tell: Tell) -> tuple[StartRadius, ...]:
    curves: list[StartRadius] = []
    for placement in report_parts(options.placements, tell, work="start radius"):
        errors = [
            run_experiment(_experiment(options, placement, ns=(options.start_n,), radius=radius)).errors["expert"][0]
            for radius in options.start_radii
        ]
        curves.append(StartRadius(placement=placement, error=_curve(options.start_radii, np.stack(errors))))
    return tuple(curves)


def _near_gates(options: RatesOptions, tell: Tell) -> tuple[NearGates, ...]:
    found: list[NearGates] = []
    asked = list(product(options.gated_placements, options.gate_distances))
    for placement, distance in report_parts(asked, tell, work="near gates", describe=_join):
        truth = default_truth(placement)
        apart = truth.gate[1] - truth.gate[0]
        second = truth.gate[0] + distance * apart / np.linalg.norm(apart)
        near = replace(truth, gate=np.stack([truth.gate[0], second]))
        # The experts of gates that nearly coincide run away from each other, some beyond all numbers.
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.filterwarnings("ignore", "Two true gates are")
            data = run_experiment(_smaller_experiment(options, placement, truth=near))
        error = float(np.median(data.errors["expert"][-1]))
        found.append(NearGates(placement=placement, distance=distance, slope=_slope(estimate_rate(data)), error=error))
    return tuple(found)


def _truths(options: RatesOptions, tell: Tell) -> tuple[OtherTruth, ...]:
    found: list[OtherTruth] = []
    asked = list(product(options.placements, range(options.num_truths)))
    for placement, number in report_parts(asked, tell, work="other truths", describe=_join):
        truth = _draw_truth(placement, np.random.default_rng([options.seed, number]))
        design = default_design(seed=options.seed + number + 1)
        data = run_experiment(_smaller_experiment(options, placement, truth=truth, design=design))
        found.append(OtherTruth(placement=placement, number=number, slope=_slope(estimate_rate(data))))
    return tuple(found)


def _surplus(options: RatesOptions, tell: Tell) -> tuple[Surplus, ...]:
    if not options.surplus:
        return ()
    found: list[Surplus] = []
    kinds: tuple[LossKind, ...] = ("vector_mass", "raw")
    asked = list(product(options.gated_placements, kinds))
    for placement, kind in report_parts(asked, tell, work="surplus experts", describe=_join):
        experiment = _smaller_experiment(options, placement, k=2 + options.surplus)
        data = run_experiment(experiment, loss=kind, max_steps=_MANY_STEPS)
        found.append(Surplus(placement=placement, kind=kind, slope=_slope(estimate_rate(data))))
    return tuple(found)


def _experiment(options: RatesOptions, placement: Placement, **changes: Any) -> ExpertExperiment:
    shared = ("ns", "replicates", "starts", "noise", "radius", "seed")
    return ExpertExperiment(placement=placement, **({name: getattr(options, name) for name in shared} | changes))


def _smaller_experiment(options: RatesOptions, placement: Placement, **changes: Any) -> ExpertExperiment:
    """Make an experiment on a limit: only sizes that slopes are taken over, every second if many, fewer replicates."""
    large = [n for n in options.ns if n >= 1000]
    ns = tuple(large[:: 2 if len(large) > 5 else 1])
    return _experiment(options, placement, ns=ns, replicates=options.limit_replicates, **changes)


def _draw_truth(placement: Placement, rng: np.random.Generator) -> ExpertTruth:
    """Draw normal parameters of the default truth's size; gates, as they act on the input, at least 1 apart."""
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
