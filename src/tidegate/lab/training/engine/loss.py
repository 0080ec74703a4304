"""How a model computes its loss while it is trained: in which precision, compiled or not, in how many parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tidegate._validation import InputError
from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.engine.parallel import Processes
from tidegate.lab.training.model import batch_loss, summed_loss
from tidegate.lab.training.run import ModelConfig, Training
from tidegate.torch.parallel import local_weights
from tidegate.torch.weights import Model


def compile_blocks(model: Model, training: Training) -> None:
    """Have the blocks compiled when they are first called, if the training asks for it.

    All blocks are of one class, so that they share what is compiled. The model keeps its class and its names.
    """
    if training.compile:
        for block in model.stack.blocks:
            block.compile()


def without_compilation() -> AbstractContextManager[Any]:
    """Run compiled blocks as they are written: where shapes change from call to call, or where calls are watched."""
    return torch.compiler.set_stance("force_eager")


def in_precision(training: Training) -> AbstractContextManager[Any]:
    """Run models in the precision of the training."""
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(training.device).type, dtype=torch.bfloat16)


def loss_parts(
    model: nn.Module, batch: Batch, training: Training, processes: Processes | None = None
) -> Iterator[Tensor]:
    """Make the parts of a batch's loss, one for each of its parts: they add up to the mean over all of its targets.

    A batch of one part has the loss of `batch_loss`. Of several processes each makes the loss of its own rows, whose
    mean over the processes is that of the batch.
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
        # The backward pass, which comes while this waits, may compute blocks again.
        with local_weights(model):
            with in_precision(training):
                loss = summed_loss(model, processes.own_rows(part))
            yield loss * (processes.gradient_weight / num_targets)


def split_rows(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Cut a batch by rows into parts of one size."""
    return map(Batch, batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts))


def require_independent_rows(config: ModelConfig, training: Training) -> None:
    """Raise InputError for parts in which a gate that reads the next sequence would find another than in the batch."""
    if training.accumulate > 1 and config.gates.read_other_sequences:
        expected = f"1 with the gate {config.gate}, which reads the next sequence of a batch"
        raise InputError("accumulate", expected=expected, got=training.accumulate)
