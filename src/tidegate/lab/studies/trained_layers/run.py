"""How do the attention layers of a language model bend, before and after training, with and without a gate?

Small byte-level models on Python's own sources, from the same initial weights and batches. Curvature is that of
`tidegate curvature`: slices of each attention layer, relative to the squared length of its outputs. One seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tidegate.config import TransformerConfig
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.language_models import language_model_of, token_windows
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

    def __post_init__(self) -> None:
        require_gates(self.gates)
        require_at_least(self, steps=1, batch_size=1, num_sequences=1, window=2, seed=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One model at one moment."""

    gate: str
    steps: int
    """Of training so far."""
    loss: float
    """On the validation's probe, in nats."""
    curvature: ModelCurvature


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedLayersResult:
    """Every model before and after its training."""

    options: TrainedLayersOptions
    measured: tuple[Snapshot, ...]


def run_trained_layers(options: TrainedLayersOptions, *, tell: Tell = ignore) -> TrainedLayersResult:
    """Train one model for each gate, and measure its layers at the start and at the end."""
    data = text_task(length=options.length).load()
    return TrainedLayersResult(
        options=options,
        measured=tuple(
            each
            for gate in report_parts(options.gates, tell, work="trained-layers")
            for each in _snapshots(gate, data, options)
        ),
    )


def finding(result: TrainedLayersResult) -> str:
    """Say what holds, from the numbers."""
    parts = []
    for each in result.measured:
        layers = each.curvature.layers
        bends = ", ".join(f"{layer.magnitude:.2g}" for layer in layers)
        positive = sum(layer.positive for layer in layers) / len(layers)
        when = f"after {each.steps} steps (loss {each.loss:.2f})" if each.steps else "at the start"
        parts.append(f"{each.gate} {when}: {bends}, {100 * positive:.0f} % positive")
    return f"Median |K| of attention slices by layer. {'; '.join(parts)}. One seed: what is seen, not a test."


def _snapshots(gate: str, data: TaskData, options: TrainedLayersOptions) -> Iterator[Snapshot]:
    config = TransformerConfig(
        gate=gate,
        d_model=options.d_model,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        max_length=options.length,
        vocab_size=data.vocab_size,
    )
    model = TransformerLM(config)
    model.reset_parameters(seed=options.seed)
    yield _take_snapshot(model, gate, 0, data, options)
    train(
        lambda batch: batch_loss(model, batch),
        torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0),
        (data.batch(seed=options.seed, step=step, size=options.batch_size) for step in range(options.steps)),
        schedule=warmup_and_linear_decay(options.steps),
    )
    yield _take_snapshot(model, gate, options.steps, data, options)


def _take_snapshot(
    model: TransformerLM, gate: str, steps: int, data: TaskData, options: TrainedLayersOptions
) -> Snapshot:
    language_model = language_model_of(model, name=gate)
    windows = token_windows(language_model, None, length=options.window, count=options.num_sequences)
    with torch.no_grad():
        loss = float(batch_loss(model, data.probe()))
    return Snapshot(
        gate=gate, steps=steps, loss=loss, curvature=model_curvature(language_model, windows, options.sampling)
    )
