"""How do the attention layers of a language model bend, before and after training, with and without a gate?

Small byte-level models on Python's own sources, one for each gate and seed; those of one seed have the same initial
weights and batches. Curvature is that of `tidegate curvature`: slices of each attention layer, relative to the squared
length of its outputs. What a model bends by is one number, the geometric mean over layers of the median |K|, so that
intervals are over seeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from tidegate.config import TransformerConfig
from tidegate.lab.judging import t_interval
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.language_models import make_language_model, spread_windows, text_tokens
from tidegate.lab.studies.options import require_at_least, require_gates
from tidegate.lab.tasks.task import TaskData
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.lab.training.measurements import ModelCurvature, Sampling
from tidegate.lab.training.model import batch_loss
from tidegate.torch import TransformerLM


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedLayersOptions:
    """Sizes of the models, of the training and of the sample."""

    gates: tuple[str, ...] = ("none", "bma", "g1", "output:output")
    d_model: int = 64
    num_heads: int = 4
    num_layers: int = 4
    length: int = 64
    steps: int = 200
    batch_size: int = 16
    learning_rate: float = 3e-3
    num_sequences: int = 3
    window: int = 32
    """Tokens of a sequence on which curvature is measured."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """The first of the seeds."""
    num_seeds: int = 5

    def __post_init__(self) -> None:
        require_gates(self.gates)
        # An interval needs two seeds.
        require_at_least(self, steps=1, batch_size=1, num_sequences=1, window=2, seed=0, num_seeds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One model at one moment."""

    gate: str
    seed: int = 0
    """Records from before there were several have the seed 0 alone."""
    steps: int
    """Of training so far."""
    loss: float
    """On the validation's probe, in nats."""
    curvature: ModelCurvature


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean over seeds, with its 95 % interval; an end is None where there is one seed."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Two digits each, or whole numbers from 100 on."""
        ends = "" if self.low is None or self.high is None else f" ({_format(self.low)} … {_format(self.high)})"
        return f"{_format(self.value)}{ends}"

    @property
    def excludes_one(self) -> bool:
        """Whether the interval of a ratio lies on one side of 1."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedLayersResult:
    """Every model before and after its training."""

    options: TrainedLayersOptions
    measured: tuple[Snapshot, ...]

    def of(self, gate: str, *, trained: bool) -> tuple[Snapshot, ...]:
        """Return the models with that gate at one moment, one a seed."""
        steps = self.options.steps if trained else 0
        return tuple(each for each in self.measured if each.gate == gate and each.steps == steps)


def run_trained_layers(options: TrainedLayersOptions, *, tell: Tell = ignore) -> TrainedLayersResult:
    """Train one model for each gate and seed, and measure its layers at the start and at the end."""
    data = text_task(length=options.length).load()
    parts = list(product(options.gates, range(options.seed, options.seed + options.num_seeds)))
    reported = report_parts(parts, tell, work="trained-layers", describe=lambda part: f"{part[0]}, seed {part[1]}")
    return TrainedLayersResult(
        options=options,
        measured=tuple(each for gate, seed in reported for each in _snapshots(gate, seed, data, options)),
    )


def magnitude(models: Sequence[Snapshot], *, layer: int | None = None) -> Mean:
    """Return the geometric mean over models of the median |K|: of one layer, or of each model's layers together."""
    return _geometric_mean([_magnitude(each, layer) for each in models])


def ratio(models: Sequence[Snapshot], others: Sequence[Snapshot]) -> Mean:
    """Return how many times as much as the other of its pair a model bends: the geometric mean over pairs."""
    return _geometric_mean([_magnitude(one) / _magnitude(other) for one, other in zip(models, others, strict=True)])


def positive_share(models: Sequence[Snapshot], *, layer: int | None = None) -> Mean:
    """Return the share of slices with positive curvature, the mean over models."""
    shares = [
        float(np.mean([one.positive for one in each.curvature.layers if layer in (None, one.layer)])) for each in models
    ]
    return _mean(shares)


def finding(result: TrainedLayersResult) -> str:
    """Say what holds, from the numbers."""
    gates, steps = result.options.gates, result.options.steps
    start = {gate: result.of(gate, trained=False) for gate in gates}
    end = {gate: result.of(gate, trained=True) for gate in gates}
    num_seeds = len(end[gates[0]])
    parts = [
        f"Median |K| of attention slices, geometric means over layers and {num_seeds} seeds with 95 % intervals over "
        "seeds, each by itself."
        if num_seeds > 1
        else "Median |K| of attention slices, geometric means over layers. One seed: what is seen, not a test.",
        f"At the start: {_list(gates, lambda gate: magnitude(start[gate]))}.",
        f"After {steps} steps: {_list(gates, lambda gate: magnitude(end[gate]))}; that is, times as much: "
        f"{_list(gates, lambda gate: ratio(end[gate], start[gate]))}.",
        f"Positive share then: {_list(gates, lambda gate: positive_share(end[gate]))}.",
    ]
    if "none" in gates and len(gates) > 1:
        beside = {gate: ratio(end[gate], end["none"]) for gate in gates if gate != "none"}
        told_apart = ", ".join(gate for gate, each in beside.items() if each.excludes_one) or "none of them"
        intervals = f"; intervals that exclude 1: {told_apart}" if num_seeds > 1 else ""
        parts.append(
            f"After training a gated model bends, times as much as the one without a gate of the same seed: "
            f"{_list(beside, beside.__getitem__)}{intervals}."
        )
    return " ".join(parts)


def _format(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def _list(gates: Iterable[str], figure: Callable[[str], Mean]) -> str:
    return ", ".join(f"{gate} {figure(gate)}" for gate in gates)


def _magnitude(each: Snapshot, layer: int | None = None) -> float:
    chosen = [one.magnitude for one in each.curvature.layers if layer in (None, one.layer)]
    return math.exp(float(np.mean(np.log(chosen))))


def _geometric_mean(values: Sequence[float]) -> Mean:
    found = _mean([math.log(value) for value in values])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Mean(value=math.exp(found.value), low=low, high=high)


def _mean(values: Sequence[float]) -> Mean:
    low, high = t_interval(values) if len(values) > 1 else (None, None)
    return Mean(value=float(np.mean(values)), low=low, high=high)


def _snapshots(gate: str, seed: int, data: TaskData, options: TrainedLayersOptions) -> Iterator[Snapshot]:
    config = TransformerConfig(
        gate=gate,
        d_model=options.d_model,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        max_length=options.length,
        vocab_size=data.vocab_size,
    )
    model = TransformerLM(config)
    model.reset_parameters(seed=seed)
    yield _take_snapshot(model, gate, seed, 0, data, options)
    train(
        lambda batch: batch_loss(model, batch),
        torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0),
        (data.batch(seed=seed, step=step, size=options.batch_size) for step in range(options.steps)),
        schedule=warmup_and_linear_decay(options.steps),
    )
    yield _take_snapshot(model, gate, seed, options.steps, data, options)


def _take_snapshot(
    model: TransformerLM, gate: str, seed: int, steps: int, data: TaskData, options: TrainedLayersOptions
) -> Snapshot:
    language_model = make_language_model(model, name=gate)
    whole, count = text_tokens(language_model, None), options.num_sequences
    # The beginning of the sources, as in the record of the study.
    tokens = whole[np.arange(min(len(whole), 512 * options.window * count))]
    windows = spread_windows(tokens, length=options.window, count=count)
    with torch.no_grad():
        loss = float(batch_loss(model, data.probe()))
    curvature = model_curvature(language_model, windows, options.sampling)
    return Snapshot(gate=gate, seed=seed, steps=steps, loss=loss, curvature=curvature)
