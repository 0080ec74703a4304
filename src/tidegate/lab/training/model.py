"""The model of a run, its loss while it trains, and its evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import InputError
from tidegate.config import TransformerConfig
from tidegate.lab.tasks.task import NO_TARGET, Batch, TaskData
from tidegate.lab.training.run import ModelConfig, Training
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.parallel import local_weights
from tidegate.torch.precision import widen
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import Model

if TYPE_CHECKING:
    from tidegate.lab.training.parallel import Processes

_LOGIT_BYTES = 1 << 28
"""Maximum size of the logits of one forward pass without gradients."""
_FLOAT_BYTES = 4


class Evaluation(NamedTuple):
    """Means over the targets of batches."""

    loss: float
    """Nats; may be infinite or nan."""
    accuracy: float
    num_targets: int


def build_model(config: ModelConfig, *, seed: int | None = None) -> Model:
    """Return the model of a configuration; with equal seeds, variants share the values of common weights."""
    model = TransformerLM(config) if isinstance(config, TransformerConfig) else VisionTransformer(config)
    if seed is not None:
        model.reset_parameters(seed=seed)
    return model


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the targets, in nats."""
    return _cross_entropy(model(batch.inputs), batch.targets)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of the targets, in nats."""
    return _cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    # Under autocast logits are of half precision, and a sum over the vocabulary would be too.
    flat = widen(logits).flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET, reduction=reduction)


def row_parts(model: Model, batch: Batch) -> Iterator[Batch]:
    """Split a batch by rows, so that the logits of a part stay small.

    A batch that fits is one part. No part has a single row unless the batch does: some gates read the next row.
    """
    config = model.config
    num_outputs = config.vocab_size if isinstance(config, TransformerConfig) else config.num_classes
    row_bytes = batch.targets[0].numel() * num_outputs * _FLOAT_BYTES
    num_rows, fitting = len(batch.inputs), max(_LOGIT_BYTES // row_bytes, 1)
    num_parts = max(1, min(math.ceil(num_rows / fitting), num_rows // 2))
    return map(Batch, batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts))


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch]) -> Evaluation:
    """Return loss and accuracy over all targets, with equal weights."""
    loss, correct, count = 0.0, 0, 0
    model.eval()
    for part in (part for batch in batches for part in row_parts(model, batch)):
        logits = model(part.inputs)
        targets = part.targets
        loss += _cross_entropy(logits, targets, reduction="sum").item()
        counted = targets != NO_TARGET
        correct += int(((logits.argmax(dim=-1) == targets) & counted).sum())
        count += int(counted.sum())
    model.train()
    return Evaluation(loss / count, correct / count, count)


def training_flops(model: Model) -> float:
    """Return the FLOPs of a training step per token, or per image."""
    if isinstance(model, TransformerLM):
        return 3 * model.flops_per_token()
    return 3 * model.flops_per_token() * model.config.num_tokens


def task_metrics(evaluation: Evaluation, data: TaskData) -> dict[str, float]:
    """Return the metrics of a task besides the loss: bits per byte of text, accuracy otherwise."""
    if data.bytes_per_token is not None:
        return {"bits_per_byte": evaluation.loss / math.log(2) / data.bytes_per_token}
    return {"accuracy": evaluation.accuracy}


def compile_blocks(model: Model, training: Training) -> None:
    """Compile the blocks at their first call, if the training asks for it.

    All blocks have one class, so they share the compiled code. The model keeps its class and its names.
    """
    if training.compile:
        for block in model.stack.blocks:
            block.compile()


def without_compilation() -> AbstractContextManager[Any]:
    """Run compiled blocks eagerly: where shapes change from call to call, or where calls are observed."""
    return torch.compiler.set_stance("force_eager")


def in_precision(training: Training) -> AbstractContextManager[Any]:
    """Return the autocast context of the training's precision."""
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(training.device).type, dtype=torch.bfloat16)


def loss_parts(
    model: nn.Module, batch: Batch, training: Training, processes: Processes | None = None
) -> Iterator[Tensor]:
    """Yield the losses of a batch's micro-batches, which add up to the mean over all of its targets.

    With one micro-batch this is `batch_loss`. Each of several processes yields the losses of its own rows, whose mean
    over the processes is that of the batch.
    """
    if processes is not None:
        yield from _shared_loss_parts(model, batch, training, processes)
        return
    if training.accumulate == 1:
        with in_precision(training):
            loss = batch_loss(model, batch)
        yield loss
        return
    num_targets = int((batch.targets != NO_TARGET).sum())
    for part in split_rows(batch, training.accumulate):
        with in_precision(training):
            loss = summed_loss(model, part)
        yield loss / num_targets


def _shared_loss_parts(model: nn.Module, batch: Batch, training: Training, processes: Processes) -> Iterator[Tensor]:
    num_targets = int((batch.targets != NO_TARGET).sum())
    for number, part in enumerate(split_rows(batch, training.accumulate), start=1):
        processes.exchange_gradients(number == training.accumulate)
        # The backward pass, which runs while this waits, may recompute blocks.
        with local_weights(model):
            with in_precision(training):
                loss = summed_loss(model, processes.own_rows(part))
            yield loss * (processes.gradient_weight / num_targets)


def split_rows(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Split a batch by rows into parts of equal size."""
    return map(Batch, batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts))


def require_independent_rows(config: ModelConfig, training: Training) -> None:
    """Raise InputError for micro-batches with a gate that reads the next sequence of the whole batch."""
    if training.accumulate > 1 and config.gates.read_other_sequences:
        expected = f"1 with the gate {config.gate}, which reads the next sequence of a batch"
        raise InputError("accumulate", expected=expected, got=training.accumulate)
