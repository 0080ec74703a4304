"""Measure the curvature of the attention layers of language models, before and after training.

Small byte-level models are trained on Python's own sources, one per gate and seed. Models of one seed share initial
weights and batches. Curvature is that of `tidegate curvature`: slices of each attention layer, relative to the squared
length of its outputs. A model's curvature is one number, the geometric mean over layers of the median |K|, so that
intervals are over seeds only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from tidegate.config import TransformerConfig
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.curvature_panels import curvature_panels
from tidegate.lab.models.language_models import make_language_model, spread_windows, text_tokens
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.intervals import SeedMean
from tidegate.lab.studies.options import require_at_least, require_gates
from tidegate.lab.studies.study import Study
from tidegate.lab.tasks.task import TaskData
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.lab.training.measurements import ModelCurvature, Sampling
from tidegate.lab.training.model import batch_loss
from tidegate.report.page import CellValue, Column, Lines, Section, Series, Table
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
    """Tokens per sequence on which curvature is measured."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """The first seed."""
    num_seeds: int = 5

    def __post_init__(self) -> None:
        require_gates(self.gates)
        # An interval needs two seeds.
        require_at_least(self, steps=1, batch_size=1, num_sequences=1, window=2, seed=0, num_seeds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One model before or after training."""

    gate: str
    seed: int
    steps: int
    """Training steps so far."""
    loss: float
    """On a part of the validation set, in nats."""
    curvature: ModelCurvature


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedLayersResult:
    """All models before and after training."""

    options: TrainedLayersOptions
    measured: tuple[Snapshot, ...]

    def of(self, gate: str, *, trained: bool) -> tuple[Snapshot, ...]:
        """Return the models with that gate, one per seed."""
        steps = self.options.steps if trained else 0
        return tuple(each for each in self.measured if each.gate == gate and each.steps == steps)


def run_trained_layers(options: TrainedLayersOptions, *, tell: Tell = ignore) -> TrainedLayersResult:
    """Train a model for each gate and seed, and measure its layers before and after."""
    data = text_task(length=options.length).load()
    parts = list(product(options.gates, range(options.seed, options.seed + options.num_seeds)))
    reported = report_parts(parts, tell, work="trained-layers", describe=lambda part: f"{part[0]}, seed {part[1]}")
    return TrainedLayersResult(
        options=options,
        measured=tuple(each for gate, seed in reported for each in _snapshots(gate, seed, data, options)),
    )


def magnitude(models: Sequence[Snapshot], *, layer: int | None = None) -> SeedMean:
    """Return the geometric mean over models of the median |K| of one layer, or of all layers together."""
    return _geometric_mean([_magnitude(each, layer) for each in models])


def ratio(models: Sequence[Snapshot], others: Sequence[Snapshot]) -> SeedMean:
    """Return the geometric mean over pairs of the ratio of their curvatures."""
    return _geometric_mean([_magnitude(one) / _magnitude(other) for one, other in zip(models, others, strict=True)])


def positive_share(models: Sequence[Snapshot]) -> SeedMean:
    """Return the share of slices with positive curvature, the mean over models."""
    return SeedMean.of([float(np.mean([layer.positive for layer in each.curvature.layers])) for each in models])


def format_mean(mean: SeedMean) -> str:
    """Format a mean and its interval with two digits, or as whole numbers from 100 on."""
    value, low, high = (
        f"{number:.2g}" if abs(number) < 100 else f"{number:.0f}" for number in (mean.value, mean.low, mean.high)
    )
    return f"{value} ({low} … {high})"


def finding(result: TrainedLayersResult) -> str:
    """State the result in sentences."""
    gates, steps = result.options.gates, result.options.steps
    start = {gate: result.of(gate, trained=False) for gate in gates}
    end = {gate: result.of(gate, trained=True) for gate in gates}
    parts = [
        f"Median |K| of attention slices: geometric means over layers and {result.options.num_seeds} seeds, with 95 % "
        "intervals over seeds that are not simultaneous.",
        f"At initialization: {_list(gates, lambda gate: magnitude(start[gate]))}.",
        f"After {steps} steps: {_list(gates, lambda gate: magnitude(end[gate]))}. Ratio to initialization: "
        f"{_list(gates, lambda gate: ratio(end[gate], start[gate]))}.",
        f"Positive share after training: {_list(gates, lambda gate: positive_share(end[gate]))}.",
    ]
    if "none" in gates and len(gates) > 1:
        ratios = {gate: ratio(end[gate], end["none"]) for gate in gates if gate != "none"}
        significant = ", ".join(gate for gate, each in ratios.items() if each.excludes(1)) or "none of them"
        parts.append(
            "After training, the curvature of a gated model divided by that of the ungated model of the same seed: "
            f"{_list(ratios, ratios.__getitem__)}; intervals that exclude 1: {significant}."
        )
    return " ".join(parts)


def _list(gates: Iterable[str], mean_of: Callable[[str], SeedMean]) -> str:
    return ", ".join(f"{gate} {format_mean(mean_of(gate))}" for gate in gates)


def _magnitude(each: Snapshot, layer: int | None = None) -> float:
    chosen = [one.magnitude for one in each.curvature.layers if layer in (None, one.layer)]
    return math.exp(float(np.mean(np.log(chosen))))


def _geometric_mean(values: Sequence[float]) -> SeedMean:
    found = SeedMean.of([math.log(value) for value in values])
    return SeedMean(value=math.exp(found.value), low=math.exp(found.low), high=math.exp(found.high))


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
    # The beginning of the sources, as in the committed record.
    tokens = whole[np.arange(min(len(whole), 512 * options.window * count))]
    windows = spread_windows(tokens, length=options.window, count=count)
    with torch.no_grad():
        loss = float(batch_loss(model, data.probe()))
    curvature = model_curvature(language_model, windows, options.sampling)
    return Snapshot(gate=gate, seed=seed, steps=steps, loss=loss, curvature=curvature)


def view(result: TrainedLayersResult) -> tuple[Section, ...]:
    """Return means over seeds, and the panels of the first seed's models before and after training."""
    moments = {"at initialization": False, f"after {result.options.steps} steps": True}
    first = result.options.seed
    return (
        Section(
            title="Over seeds",
            lead="Geometric means of the median |K|, with 95 % intervals over seeds that are not simultaneous.",
            panels=(*(_lines(result, when, trained) for when, trained in moments.items()), _table(result)),
        ),
        *(
            Section(
                title=f"Seed {first} {when}",
                panels=curvature_panels(
                    {
                        gate: each.curvature
                        for gate in result.options.gates
                        for each in result.of(gate, trained=trained)
                        if each.seed == first
                    }
                ),
            )
            for when, trained in moments.items()
        ),
    )


def _lines(result: TrainedLayersResult, when: str, trained: bool) -> Lines:
    layers = range(result.options.num_layers)
    found = {
        gate: [magnitude(result.of(gate, trained=trained), layer=layer) for layer in layers]
        for gate in result.options.gates
    }
    return Lines(
        title=f"Absolute curvature of slices {when}",
        alternative="; ".join(f"{gate}: {', '.join(map(format_mean, means))}" for gate, means in found.items()),
        x_label="layer",
        y_label="median |K|, relative",
        series=tuple(
            Series(
                label=gate,
                group=gate,
                x=tuple(map(float, layers)),
                y=tuple(mean.value for mean in means),
                low=tuple(mean.low for mean in means),
                high=tuple(mean.high for mean in means),
            )
            for gate, means in found.items()
        ),
        log_y=True,
    )


def _table(result: TrainedLayersResult) -> Table:
    names = ("|K| before", "|K| after", "ratio after/before", "positive after", "ratio of |K| to none")
    columns = (
        Column(title="gate"),
        Column(title="loss after", unit="nats/byte", digits=3, better="low"),
        *(Column(title=title, digits=3) for name in names for title in (name, "low", "high")),
    )
    rows = tuple(_row(result, gate) for gate in result.options.gates)
    return Table(title="By gate, all layers together", columns=columns, rows=rows)


def _row(result: TrainedLayersResult, gate: str) -> tuple[CellValue, ...]:
    start, end, plain = result.of(gate, trained=False), result.of(gate, trained=True), result.of("none", trained=True)
    means = [magnitude(start), magnitude(end), ratio(end, start), positive_share(end)]
    numbers: list[float | None] = [number for mean in means for number in (mean.value, mean.low, mean.high)]
    if plain and gate != "none":
        against = ratio(end, plain)
        numbers += [against.value, against.low, against.high]
    else:
        numbers += [1.0, None, None]
    return (gate, float(np.mean([each.loss for each in end])), *numbers)


STUDY = Study(
    name="trained-layers",
    question=QUESTIONS["trained-layers"],
    claim="arXiv 2604.14702 is on the curvature of attention with and without gates. Trained language models are our "
    "own question; no claim of the paper is tested.",
    options=TrainedLayersOptions(),
    result=TrainedLayersResult,
    run=run_trained_layers,
    finding=finding,
    view=view,
)
