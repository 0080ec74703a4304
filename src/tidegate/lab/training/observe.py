"""What gates and attention do in a model, and where its loss is, measured on a few examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.map_rank import GateValues, map_ranks
from tidegate.lab.training.model import row_parts
from tidegate.lab.training.records import LayerByHead, ObservationSummary
from tidegate.torch.observing import GateSummary, LayerObservation, Observation, observe
from tidegate.torch.observing.modules import follow_modules
from tidegate.torch.precision import widen
from tidegate.torch.weights import Model

_NUM_STRETCHES = 32
"""Points of a curve over positions."""


@torch.no_grad()
def observe_probe(model: Model, batch: Batch, *, tokens: int) -> ObservationSummary | None:
    """Observe a model on a batch, without dropout; `tokens` says when in the training.

    Nothing that the training depends on changes: no random number is drawn, and the model is left in training mode.
    None if a number is not finite: a model that diverges has nothing left to look at.
    """
    model.eval()
    gates = GateValues()
    with observe(model) as watcher, follow_modules(model, gates):
        model(batch.inputs)
    model.train()
    seen = summarise_observation(watcher.observation(), tokens=tokens)
    summary = replace(seen, map_rank=map_ranks(model, gates.by_gate))
    return summary if _is_finite(asdict(summary)) else None


def summarise_observation(observation: Observation, *, tokens: int) -> ObservationSummary:
    """Return the means of an observation by layer and head, as a record keeps them."""
    layers = observation.layers
    sites = sorted({site for layer in layers for site in layer.gates})
    known = all("contribution" in layer.heads for layer in layers)
    return ObservationSummary(
        tokens=tokens,
        entropy=_means(layers, "entropy"),
        sink_mass=_means(layers, "mass"),
        sink_impact=_means(layers, "impact"),
        sink_contribution=_means(layers, "contribution") if known else None,
        sink_logit=_means(layers, "sink") if all("sink" in layer.heads for layer in layers) else None,
        gates={site: _gate_figures([layer.gates[site] for layer in layers]) for site in sites},
        largest_activation=tuple(layer.residual.largest for layer in layers if layer.residual),
        effective_rank=tuple(layer.residual.effective_rank for layer in layers if layer.residual),
    )


@torch.no_grad()
def loss_by_position(model: Model, batch: Batch) -> tuple[tuple[float, float], ...]:
    """The mean loss of each of some stretches of positions, by the middle of the stretch, where it is finite."""
    model.eval()
    losses = torch.cat([_losses(model, part) for part in row_parts(model, batch)])
    model.train()
    counted = batch.targets != NO_TARGET
    stretches = torch.arange(losses.shape[1]).chunk(_NUM_STRETCHES)
    means = [float(losses[:, positions].sum() / counted[:, positions].sum()) for positions in stretches]
    middles = [float(positions.double().mean()) + 1 for positions in stretches]
    return tuple((middle, mean) for middle, mean in zip(middles, means, strict=True) if math.isfinite(mean))


def _losses(model: Model, batch: Batch) -> Tensor:
    """(B, T), 0 where there is no target."""
    logits = model(batch.inputs)
    return F.cross_entropy(widen(logits).mT, batch.targets, reduction="none", ignore_index=NO_TARGET)


def _means(layers: Sequence[LayerObservation], statistic: str) -> LayerByHead:
    return tuple(
        tuple(moments.mean if moments.count else None for moments in layer.heads[statistic]) for layer in layers
    )


def _gate_figures(layers: Sequence[GateSummary]) -> dict[str, LayerByHead]:
    return {
        "mean": tuple(gate.mean for gate in layers),
        "below": tuple(gate.below for gate in layers),
        "spread": tuple(gate.token_spread for gate in layers),
    }


def _is_finite(value: Any) -> bool:
    """Whether every number in nested dictionaries and tuples is finite; None is no number."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    return value is None or math.isfinite(value)
