"""Do gates learn when they are added to a trained model, and which remedy makes them move?

A small Llama is trained without gates on Python's own sources, byte by byte, each window behind a token that stands
for its start. Copies of it are given output gates that start at exactly 1, and go on for some steps in which the gates
alone learn, at several rates, with and without decay, or in which gates learn first and then all weights together. The
controls go on for as many steps on the same batches with all weights of the model: without gates at two rates, and with
them.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.lab.judging import t_interval
from tidegate.lab.studies.options import require_at_least
from tidegate.lab.tasks.task import Batch
from tidegate.lab.tasks.text import TextData, text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.torch.gate import AttentionGate, gate_parameters
from tidegate.torch.observing import observe

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Groups: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """How a trained model goes on."""

    name: str
    gate_rate: float | None = None
    """The gates' learning rate as a multiple of the base rate; None adds no gates."""
    gate_decay: bool = False
    """Whether the gates' weights decay."""
    whole_rate: float | None = None
    """The learning rate of all other weights, likewise; None keeps them as they are."""
    gates_first: bool = False
    """Whether gates learn alone for the first half of the steps; then each half has a warm-up of its own."""


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
    """Sizes of the model, of its training and of what follows."""

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
    """Of what follows the training; remedies multiply it."""
    decay: float = 0.1
    """Of gates, where a remedy asks for it."""
    num_validation_tokens: int = 16_384
    num_seeds: int = 5

    def __post_init__(self) -> None:
        # Gates that learn first do so for half of the steps, and intervals need two seeds.
        require_at_least(self, training_steps=1, tuning_steps=2, batch_size=1, length=2, num_seeds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One model on the validation text."""

    loss: float
    """Nats a byte."""
    sink: float
    """Attention to the start of the window, the mean over layers, heads and all queries but the first."""
    strongest: float
    """The same in the head that has most of it."""
    movement: float | None
    """Mean distance of the gates from 1; None without gates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A mean difference over seeds, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyRow:
    """One remedy: what it gives under each seed, and what it changes."""

    remedy: Remedy
    measured: tuple[ModelFigures, ...]
    loss: Change
    """After it, less before it."""
    sink: Change
    strongest: Change
    against_control: Change | None
    """Loss less that of the control, whose own is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateTuningResult:
    """The trained models under each seed, and every remedy."""

    options: GateTuningOptions
    num_parameters: int
    num_gate_parameters: int
    before: tuple[ModelFigures, ...]
    rows: tuple[RemedyRow, ...]


def run_gate_tuning(options: GateTuningOptions, *, tell: Tell = ignore) -> GateTuningResult:
    """Train a model for each seed, let copies of it go on by each remedy, and measure them all."""
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
    """Say what holds, from the numbers."""
    alone = [row for row in result.rows if row.remedy.whole_rate is None]
    best = min(alone, key=lambda row: row.loss.value)
    moved = statistics.fmean(each.movement or 0.0 for each in best.measured)
    others = "; ".join(f"{row.remedy.name} {_in_words(row.loss)}" for row in result.rows if row not in alone)
    return (
        f"Before, the loss is {statistics.fmean(each.loss for each in result.before):.4f} nats a byte, "
        f"{statistics.fmean(each.sink for each in result.before):.3f} of attention goes to the start of the window and "
        f"{statistics.fmean(each.strongest for each in result.before):.3f} in the head that looks there most. "
        f"Of the remedies in which gates alone learn, {best.remedy.name} changes the loss most, by "
        f"{_in_words(best.loss)}, attention to the start by {_in_words(best.sink)}, in the strongest head by "
        f"{_in_words(best.strongest)}; its gates end {moved:.3f} from 1 on average. "
        f"With all weights learning, the loss changes by: {others}."
    )


def _in_words(change: Change) -> str:
    shown = "" if change.shown else ", which includes 0"
    return f"{change.value:+.4f} ({change.low:+.4f} … {change.high:+.4f}{shown})"


def _train_ungated(data: TextData, options: GateTuningOptions, seed: int) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        # The last token is the start of a window.
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
    """Train a copy further by the remedy, on batches that the first training has not seen."""
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
    """Group what learns by its rate and decay, and freeze the rest.

    These are not the public groups, in which gates never decay: some remedies let them.
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
    with observe(model, keys=1, residual=False) as watcher, _gate_distances(model) as distances:
        losses = [float(_loss(model, batch)) for batch in batches]
    masses = [head.mean for layer in watcher.observation().layers for head in layer.heads["mass"]]
    return ModelFigures(
        loss=statistics.fmean(losses, weights=[batch.targets.numel() for batch in batches]),
        sink=statistics.fmean(masses),
        strongest=max(masses),
        movement=statistics.fmean(distances) if distances else None,
    )


@contextmanager
def _gate_distances(model: nn.Module) -> Generator[list[float]]:
    """Collect the mean of |gate - 1| in every call of every gate."""
    distances: list[float] = []
    gates = [module for module in model.modules() if isinstance(module, AttentionGate)]
    handles = [
        gate.register_forward_hook(lambda *call: distances.append(float((call[2] - 1).abs().mean()))) for gate in gates
    ]
    try:
        yield distances
    finally:
        for handle in handles:
            handle.remove()


def _row(
    remedy: Remedy, measured: Sequence[ModelFigures], before: Sequence[ModelFigures], control: Sequence[ModelFigures]
) -> RemedyRow:
    def change(name: str, since: Sequence[ModelFigures]) -> Change:
        differences = [getattr(new, name) - getattr(old, name) for new, old in zip(measured, since, strict=True)]
        low, high = t_interval(differences)
        return Change(value=statistics.fmean(differences), low=low, high=high)

    return RemedyRow(
        remedy=remedy,
        measured=tuple(measured),
        loss=change("loss", before),
        sink=change("sink", before),
        strongest=change("strongest", before),
        against_control=None if remedy == CONTROL else change("loss", control),
    )
