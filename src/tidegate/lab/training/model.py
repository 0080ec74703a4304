"""The model of a run, its loss, and what it says of its data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.config import TransformerConfig, VisionConfig
from tidegate.lab.tasks.task import NO_TARGET, Batch, TaskData
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.precision import widen
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import Model

_LOGIT_BYTES = 1 << 28
"""As much as the logits of one forward pass without gradients may take."""
_FLOAT_BYTES = 4


class Evaluation(NamedTuple):
    """Means over the targets of some batches."""

    loss: float
    """Nats; may be infinite or nan."""
    accuracy: float
    num_targets: int


def build_model(config: TransformerConfig | VisionConfig, *, seed: int | None = None) -> Model:
    """The model of a configuration; with a seed, variants share every weight that they have in common."""
    model = TransformerLM(config) if isinstance(config, TransformerConfig) else VisionTransformer(config)
    if seed is not None:
        model.reset_parameters(seed=seed)
    return model


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the targets, in nats."""
    return _cross_entropy(model(batch.inputs), batch.targets)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the targets' cross-entropies, in nats."""
    return _cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    # Under autocast logits are of half precision, and a sum over the vocabulary would be too.
    flat = widen(logits).flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET, reduction=reduction)


def row_parts(model: Model, batch: Batch) -> Iterator[Batch]:
    """The batch by rows, so that the logits of a part stay small, but for two rows that are larger alone.

    A batch that fits is one part: what comes of it does not depend on the limit. No part has a single row, unless it is
    the only one: some gates read the next.
    """
    config = model.config
    num_outputs = config.vocab_size if isinstance(config, TransformerConfig) else config.num_classes
    row_bytes = batch.targets[0].numel() * num_outputs * _FLOAT_BYTES
    num_rows, fitting = len(batch.inputs), max(_LOGIT_BYTES // row_bytes, 1)
    num_parts = max(1, min(math.ceil(num_rows / fitting), num_rows // 2))
    return map(Batch, batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts))


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch]) -> Evaluation:
    """Loss and accuracy over all targets, each counting the same."""
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
    """Multiplications and additions of a training step for each token, or for each image."""
    if isinstance(model, TransformerLM):
        return 3 * model.flops_per_token()
    return 3 * model.flops_per_token() * model.config.num_tokens


def task_metrics(evaluation: Evaluation, data: TaskData) -> dict[str, float]:
    """What a task reports besides the loss: bits per byte of text, accuracy of all else."""
    if data.bytes_per_token is not None:
        return {"bits_per_byte": evaluation.loss / math.log(2) / data.bytes_per_token}
    return {"accuracy": evaluation.accuracy}
