"""Fine-tune gates that were added to a trained model, by several recipes.

A small byte-level Llama is trained without gates on Python's own sources; a start token precedes each window. Copies
receive output gates that start at exactly 1 and are fine-tuned for some steps: only the gates, at several learning
rates, with and without weight decay; or the gates first and then all weights. The controls fine-tune all weights on the
same batches for as many steps: without gates at two learning rates, and with gates.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.intervals import SeedMean, format_interval, interval_panel
from tidegate.lab.studies.options import require_at_least
from tidegate.lab.studies.study import Study
from tidegate.lab.tasks.task import Batch
from tidegate.lab.tasks.text import TextData, text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.report.page import CellValue, Column, Intervals, Section, Table
from tidegate.torch.gate import AttentionGate, gate_parameters
from tidegate.torch.observing import observe

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Groups: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A recipe for fine-tuning a trained model."""

    name: str
    gate_rate: float | None = None
    """Learning rate of the gates as a multiple of the base rate; None adds no gates."""
    gate_decay: bool = False
    """Whether weight decay applies to the gates."""
    whole_rate: float | None = None
    """Learning rate of all other weights as a multiple of the base rate; None freezes them."""
    gates_first: bool = False
    """Whether only the gates are trained in the first half of the steps; each half then has its own warm-up."""


CONTROL = Remedy(name="whole model ×1, no gates", whole_rate=1.0)
REMEDIES = (
    *(
        Remedy(name=f"gates alone ×{rate:g}{', decay' if decay else ''}", gate_rate=rate, gate_decay=decay)
        for decay in (False, True)
        for rate in (1.0, 10.0, 30.0)
    ),
    CONTROL,
    Remedy(name="whole model ×10, no gates", whole_rate=10.0),
    Remedy(name="whole model ×1, gates ×10", whole_rate=1.0, gate_rate=10.0),
    Remedy(name="gates alone ×10, then both", whole_rate=1.0, gate_rate=10.0, gates_first=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateTuningOptions:
    """Sizes of the model, of its training and of the fine-tuning."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    length: int = 64
    batch_size: int = 8
    training_steps: int = 1200
    training_rate: float = 3e-3
    tuning_steps: int = 150
    base_rate: float = 3e-4
    """Learning rate of the fine-tuning, which remedies multiply."""
    decay: float = 0.1
    """Weight decay of the gates in remedies with decay."""
    num_validation_tokens: int = 16_384
    num_seeds: int = 5

    def __post_init__(self) -> None:
        # Each half of the fine-tuning needs a step, and an interval two seeds.
        require_at_least(self, training_steps=1, tuning_steps=2, batch_size=1, length=2, num_seeds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """Metrics of one model on the validation text."""

    loss: float
    """In nats per byte."""
    sink: float
    """Attention to the start token: the mean over layers, heads and all queries but the first."""
    strongest: float
    """Attention to the start token in the head with the largest."""
    movement: float | None
    """Mean |gate - 1|; None without gates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyRow:
    """The metrics after one remedy under each seed, and the mean changes."""

    remedy: Remedy
    measured: tuple[ModelFigures, ...]
    loss: SeedMean
    """Change of the loss by the fine-tuning."""
    sink: SeedMean
    strongest: SeedMean
    against_control: SeedMean | None
    """Difference in loss from the control; None for the control."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateTuningResult:
    """The trained models under each seed, and all remedies."""

    options: GateTuningOptions
    num_parameters: int
    num_gate_parameters: int
    before: tuple[ModelFigures, ...]
    rows: tuple[RemedyRow, ...]


def run_gate_tuning(options: GateTuningOptions, *, tell: Tell = ignore) -> GateTuningResult:
    """Train a model for each seed, fine-tune a copy by each remedy, and measure all models."""
    data = replace(text_task(length=options.length), num_validation_tokens=options.num_validation_tokens).load()
    before: list[ModelFigures] = []
    after: dict[Remedy, list[ModelFigures]] = {remedy: [] for remedy in REMEDIES}
    sizes: set[tuple[int, int]] = set()
    for seed in report_parts(range(options.num_seeds), tell, work="gate-tuning", describe=lambda seed: f"seed {seed}"):
        trained = _train_ungated(data, options, seed)
        before.append(_measure(trained, data))
        for remedy, measured in after.items():
            model = _continue_training(trained, remedy, data, options, seed)
            measured.append(_measure(model, data))
            if gates := sum(gate.numel() for gate in gate_parameters(model)):
                sizes.add((trained.num_parameters(), gates))
    ((num_parameters, num_gate_parameters),) = sizes
    return GateTuningResult(
        options=options,
        num_parameters=num_parameters,
        num_gate_parameters=num_gate_parameters,
        before=tuple(before),
        rows=tuple(_row(remedy, measured, before, after[CONTROL]) for remedy, measured in after.items()),
    )


def finding(result: GateTuningResult) -> str:
    """State the result in sentences."""
    before = {name: _mean(result.before, name) for name in ("loss", "sink", "strongest")}
    alone = [row for row in result.rows if row.remedy.whole_rate is None]
    best = min(alone, key=lambda row: row.loss.value)
    moved = statistics.fmean(each.movement or 0.0 for each in best.measured)
    others = "; ".join(f"“{row.remedy.name}” {_describe(row.loss)}" for row in result.rows if row not in alone)
    return (
        f"Before fine-tuning the loss is {before['loss']:.4f} nats/byte; attention to the start token is "
        f"{before['sink']:.3f} on average and {before['strongest']:.3f} in the strongest head. "
        f"Of the remedies that train only the gates, “{best.remedy.name}” changes the loss most, by "
        f"{_describe(best.loss)}, attention to the start token by {_describe(best.sink)}, in the strongest head by "
        f"{_describe(best.strongest)}; its gates end at a mean distance of {moved:.3f} from 1. "
        f"With all weights trained, the loss changes by: {others}."
    )


def _mean(models: Sequence[ModelFigures], name: str) -> float:
    return statistics.fmean(getattr(each, name) for each in models)


def _describe(change: SeedMean) -> str:
    words = format_interval(change, "+.4f")
    return words if change.excludes(0) else f"{words[:-1]}, which includes 0)"


def _train_ungated(data: TextData, options: GateTuningOptions, seed: int) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        # The last token is the start token.
        vocab_size=data.vocab_size + 1,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        max_position_embeddings=options.length + 1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(config)
    batches = (data.batch(seed=seed, step=step, size=options.batch_size) for step in range(options.training_steps))
    groups = [_group(model.parameters(), rate=options.training_rate)]
    _train(model, groups, batches, num_steps=options.training_steps)
    return model


def _continue_training(
    trained: LlamaForCausalLM, remedy: Remedy, data: TextData, options: GateTuningOptions, seed: int
) -> LlamaForCausalLM:
    """Fine-tune a copy by the remedy, on batches that the first training has not seen."""
    from tidegate.torch.retrofit import add_gates

    model = copy.deepcopy(trained)
    if remedy.gate_rate is not None:
        add_gates(model, "g1", "twosigmoid")
    batches = (
        data.batch(seed=seed, step=options.training_steps + step, size=options.batch_size)
        for step in range(options.tuning_steps)
    )
    alone = options.tuning_steps // 2 if remedy.gates_first else 0
    for phase, num_steps in ((replace(remedy, whole_rate=None), alone), (remedy, options.tuning_steps - alone)):
        if num_steps:
            _train(model, _groups(model, phase, options), islice(batches, num_steps), num_steps=num_steps)
    return model


def _groups(model: LlamaForCausalLM, remedy: Remedy, options: GateTuningOptions) -> Groups:
    """Group the trained parameters by learning rate and decay, and freeze the others.

    The public groups do not serve here, because their gates never decay.
    """
    gates = list(gate_parameters(model))
    known = set(gates)
    rest = [weight for weight in model.parameters() if weight not in known]
    groups: Groups = []
    if remedy.whole_rate is not None:
        groups.append(_group(rest, rate=remedy.whole_rate * options.base_rate))
    if remedy.gate_rate is not None:
        decay = options.decay if remedy.gate_decay else 0.0
        groups.append(_group(gates, rate=remedy.gate_rate * options.base_rate, decay=decay))
    for weight in rest:
        weight.requires_grad_(remedy.whole_rate is not None)
    return groups


def _group(parameters: Iterable[nn.Parameter], *, rate: float, decay: float = 0.0) -> dict[str, Any]:
    return {"params": list(parameters), "lr": rate, "weight_decay": decay}


def _train(model: LlamaForCausalLM, groups: Groups, batches: Iterable[Batch], *, num_steps: int) -> None:
    model.train()
    schedule = warmup_and_linear_decay(num_steps)
    train(lambda batch: _loss(model, batch), torch.optim.AdamW(groups), batches, schedule=schedule)


def _loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    tokens = F.pad(batch.inputs, (1, 0), value=model.config.vocab_size - 1)
    logits: Any = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), batch.targets.flatten())


@torch.no_grad()
def _measure(model: LlamaForCausalLM, data: TextData) -> ModelFigures:
    model.eval()
    batches = data.validation()
    distances: list[float] = []
    with observe(model, keys=1, residual=False) as watcher:
        for module in model.modules():
            if isinstance(module, AttentionGate):
                # The hook is not removed: no model is used after it is measured, except one without gates.
                module.register_forward_hook(lambda *call: distances.append(float((call[2] - 1).abs().mean())))
        losses = [float(_loss(model, batch)) for batch in batches]
    masses = [head.mean for layer in watcher.observation().layers for head in layer.heads["mass"]]
    return ModelFigures(
        loss=statistics.fmean(losses, weights=[batch.targets.numel() for batch in batches]),
        sink=statistics.fmean(masses),
        strongest=max(masses),
        movement=statistics.fmean(distances) if distances else None,
    )


def _row(
    remedy: Remedy, measured: Sequence[ModelFigures], before: Sequence[ModelFigures], control: Sequence[ModelFigures]
) -> RemedyRow:
    def change(name: str, since: Sequence[ModelFigures]) -> SeedMean:
        return SeedMean.of([getattr(new, name) - getattr(old, name) for new, old in zip(measured, since, strict=True)])

    return RemedyRow(
        remedy=remedy,
        measured=tuple(measured),
        loss=change("loss", before),
        sink=change("sink", before),
        strongest=change("strongest", before),
        against_control=None if remedy == CONTROL else change("loss", control),
    )


_CHANGES = {
    "loss": "Change in loss",
    "against_control": f"Difference in loss from {CONTROL.name}",
    "sink": "Change in attention to the start token",
    "strongest": "Change in attention to the start token in the strongest head",
}


def view(result: GateTuningResult) -> tuple[Section, ...]:
    """Return a table of all remedies, and their changes with intervals."""
    options = result.options
    lead = (
        f"A Llama of {result.num_parameters:,} parameters, {options.training_steps} steps of {options.batch_size} × "
        f"{options.length} bytes; then {options.tuning_steps} steps with {result.num_gate_parameters:,} gate "
        f"parameters, base rate {options.base_rate:g}, {options.num_seeds} seeds. Intervals are not simultaneous."
    )
    return (
        Section(title="Remedies", lead=lead, panels=(_table(result), *(_intervals(result, name) for name in _CHANGES))),
    )


def _table(result: GateTuningResult) -> Table:
    columns = (
        Column(title="remedy"),
        Column(title="loss", unit="nats/byte", digits=4, better="low"),
        Column(title="attention to the start token", digits=4, help="The mean over layers, heads and queries."),
        Column(title="in the strongest head", digits=4),
        Column(title="mean |gate − 1|", digits=4),
    )
    measured = {"before": result.before, **{row.remedy.name: row.measured for row in result.rows}}
    rows: list[tuple[CellValue, ...]] = []
    for name, models in measured.items():
        means = (_mean(models, part) for part in ("loss", "sink", "strongest"))
        movements = [each.movement for each in models if each.movement is not None]
        rows.append((name, *means, statistics.fmean(movements) if movements else None))
    return Table(title="Means over seeds", columns=columns, rows=tuple(rows))


def _intervals(result: GateTuningResult, name: str) -> Intervals:
    changes = {row.remedy.name: getattr(row, name) for row in result.rows if getattr(row, name) is not None}
    return interval_panel(_CHANGES[name], "difference, 95 % intervals over seeds", changes, form="+.4f")


STUDY = Study(
    name="gate-tuning",
    question=QUESTIONS["gate-tuning"],
    claim="Our own question: no paper is on gates that are added to a trained model. Attention to the start token is "
    "measured because the bilinear-modulation note, arXiv 2505.06708 and arXiv 2602.01468 claim that gates lower it.",
    options=GateTuningOptions(),
    result=GateTuningResult,
    run=run_gate_tuning,
    finding=finding,
    view=view,
)
