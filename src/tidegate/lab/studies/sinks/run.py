"""Where does the weight of attention go: to the first key, to a sink, to the other keys?

Small byte-level models on Python's own sources, one for each gate and seed; those of one seed have the same initial
weights and batches. Before each window there is a token for its start: that is the first key, on which a head without a
sink can park its weight.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.studies.options import require_at_least, require_gates
from tidegate.lab.tasks.task import Batch
from tidegate.lab.tasks.text import TextData, text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.lab.training.observe import summarize_observation
from tidegate.lab.training.records import LayerByHead
from tidegate.torch import TransformerLM, observe
from tidegate.torch.gate_groups import gate_optimizer_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class SinksOptions:
    """Sizes of the models and of their training."""

    gates: tuple[str, ...] = ("none", "sink", "off-by-one", "g1", "bma")
    d_model: int = 64
    num_heads: int = 4
    num_layers: int = 3
    length: int = 64
    """Bytes of a window, its start not counted."""
    steps: int = 700
    batch_size: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    """Of matrices; gates, sinks and norms have none."""
    num_validation_tokens: int = 16_384
    num_seeds: int = 2

    def __post_init__(self) -> None:
        require_gates(self.gates)
        require_at_least(self, steps=1, batch_size=1, length=2, num_seeds=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """One model after its training, on the validation text: means over queries, by layer and head."""

    gate: str
    seed: int
    loss: float
    """Nats a byte."""
    first_key: LayerByHead
    """Weight on the first key."""
    sink: LayerByHead | None
    """Weight on the sink; None where there is none."""
    contribution: LayerByHead
    """Size of what the first key adds to the layer's output, in units of that output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinksResult:
    """Every model."""

    options: SinksOptions
    models: tuple[TrainedModel, ...]

    def of(self, gate: str) -> tuple[TrainedModel, ...]:
        """Return the models with that gate, one a seed."""
        return tuple(model for model in self.models if model.gate == gate)

    @property
    def even_share(self) -> float:
        """Mean weight on the first key of a head that spreads its weight evenly over all keys that it may see."""
        return statistics.fmean(1 / keys for keys in range(2, self.options.length + 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Means over layers, heads and seeds of one gate."""

    loss: float
    first_key: float
    strongest: float
    """Weight on the first key in the head with most of it, the mean over seeds."""
    sink: float | None
    """None where there is none."""
    contribution: float

    @property
    def other_keys(self) -> float:
        """What is left of the weight."""
        return 1 - self.first_key - (self.sink or 0.0)


def run_sinks(options: SinksOptions, *, tell: Tell = ignore) -> SinksResult:
    """Train a model for each gate and seed, and observe where its attention goes."""
    data = replace(text_task(length=options.length), num_validation_tokens=options.num_validation_tokens).load()
    parts = list(product(options.gates, range(options.num_seeds)))
    models = [
        _observe(_train(gate, seed, data, options), gate, seed, data)
        for gate, seed in report_parts(parts, tell, work="sinks", describe=lambda part: f"{part[0]}, seed {part[1]}")
    ]
    return SinksResult(options=options, models=tuple(models))


def shares_of(models: Sequence[TrainedModel]) -> Shares:
    """Return the means of one gate's models."""
    on_sinks = heads_of(model.sink for model in models)
    return Shares(
        loss=statistics.fmean(model.loss for model in models),
        first_key=statistics.fmean(heads_of(model.first_key for model in models)),
        strongest=statistics.fmean(max(heads_of([model.first_key])) for model in models),
        sink=statistics.fmean(on_sinks) if on_sinks else None,
        contribution=statistics.fmean(heads_of(model.contribution for model in models)),
    )


def heads_of(maps: Iterable[LayerByHead | None]) -> list[float]:
    """Return the values of all heads of all layers, model by model; a model without the statistic has none."""
    return [value for rows in maps for row in rows or () for value in row if value is not None]


def finding(result: SinksResult) -> str:
    """Say what holds, from the numbers."""
    parts = []
    for gate in result.options.gates:
        shares = shares_of(result.of(gate))
        sink = "" if shares.sink is None else f", {shares.sink:.3f} on the sink"
        parts.append(
            f"{gate} {shares.first_key:.3f} on the first key ({shares.strongest:.3f} in the head with most), "
            f"which adds {shares.contribution:.3f}{sink}, loss {shares.loss:.3f}"
        )
    seeds = f"{result.options.num_seeds} seeds" if result.options.num_seeds > 1 else "One seed"
    return (
        f"Weight of attention, means over layers, heads and seeds; even weights would have {result.even_share:.3f} on "
        f"the first key. {'; '.join(parts)}. {seeds} of small models: what is seen, not a test."
    )


def _train(gate: str, seed: int, data: TextData, options: SinksOptions) -> TransformerLM:
    model = TransformerLM(
        TransformerConfig(
            gate=gate,
            d_model=options.d_model,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            max_length=options.length + 1,
            # The last token is the start of a window.
            vocab_size=data.vocab_size + 1,
        )
    )
    model.reset_parameters(seed=seed)
    rate = options.learning_rate
    train(
        lambda batch: _loss(model, batch),
        torch.optim.AdamW(gate_optimizer_groups(model, lr=rate, gate_lr=rate, weight_decay=options.weight_decay)),
        (data.batch(seed=seed, step=step, size=options.batch_size) for step in range(options.steps)),
        schedule=warmup_and_linear_decay(options.steps),
    )
    return model


def _loss(model: TransformerLM, batch: Batch) -> Tensor:
    tokens = F.pad(batch.inputs, (1, 0), value=model.config.vocab_size - 1)
    return F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), batch.targets.flatten())


@torch.no_grad()
def _observe(model: TransformerLM, gate: str, seed: int, data: TextData) -> TrainedModel:
    model.eval()
    batches = data.validation()
    with observe(model, residual=False) as watcher:
        losses = [float(_loss(model, batch)) for batch in batches]
    seen = summarize_observation(watcher.observation(), tokens=0)
    assert seen.sink_contribution is not None
    return TrainedModel(
        gate=gate,
        seed=seed,
        loss=statistics.fmean(losses, weights=[batch.targets.numel() for batch in batches]),
        first_key=seen.sink_mass,
        sink=seen.sink_logit,
        contribution=seen.sink_contribution,
    )
