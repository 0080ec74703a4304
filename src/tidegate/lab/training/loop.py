"""The training loop of all that is trained here: runs and studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Schedule: TypeAlias = Callable[[int], float]
"""Gives, for the number of a step from 0 on, the share of every learning rate at which it is made."""

_Batch = TypeVar("_Batch")


class StepFigures(NamedTuple):
    """What one step of training shows."""

    loss: float
    """Before the step."""
    norm: float
    """Of the whole gradient, before it is clipped."""
    gate_norm: float
    """Of the gates' part of it; 0 without gates."""


def take_step(
    losses: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    share: float,
    clip: float | None,
    parameters: Iterable[nn.Parameter],
    gates: Iterable[nn.Parameter] = (),
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> StepFigures:
    """Make one update.

    losses     : parts that add up to the loss, each made when it is asked for, as a generator does: what a part keeps
                 for its gradient is freed before the next is made
    share      : of the learning rates that the optimiser's groups were made with
    clip       : greatest norm of the gradient; None leaves the gradient as it is
    parameters : all that learn
    gates      : those of them whose gradient's norm is also wanted alone
    mean       : makes the loss of all processes from that of this one
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
    optimizer.zero_grad()
    loss = _add_gradients(losses)
    parameters = list(parameters)
    gate_norm, norm = _gradient_norm(gates), _gradient_norm(parameters)
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    return StepFigures(mean(loss).item(), norm.item(), gate_norm.item())


def _add_gradients(losses: Iterable[Tensor]) -> Tensor:
    """Add up the gradients of all parts; return the sum of the parts."""
    parts: list[Tensor] = []
    for loss in losses:
        loss.backward()
        parts.append(loss.detach())
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def train(
    loss_of: Callable[[_Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[_Batch],
    *,
    schedule: Schedule,
    clip: float | None = 1.0,
) -> None:
    """Make one update on each batch."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step, batch in enumerate(batches):
        take_step(map(loss_of, (batch,)), optimizer, share=schedule(step), clip=clip, parameters=parameters)


NUM_BEFORE_SPIKE = 64
"""Steps whose losses say what is usual."""


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether the loss of a step lies five deviations above the median of the steps right before it.

    The deviation is taken from the median distance to the median, so that one spike does not hide the next. With fewer
    than `NUM_BEFORE_SPIKE` steps before it, none is called a spike.
    """
    if len(before) < NUM_BEFORE_SPIKE:
        return False
    middle = median(before)
    spread = median(abs(value - middle) for value in before)
    return loss > middle + 5 * _NORMAL_DEVIATION * spread


_NORMAL_DEVIATION = 1.4826
"""Of normal numbers, the standard deviation over the median distance to the median."""


def warmup_and_linear_decay(num_steps: int, *, warmup: int = 20) -> Schedule:
    """Rise over the first steps, and fall from the first to the last along a straight line to 0."""
    return lambda step: min(1.0, (step + 1) / warmup) * (1 - step / num_steps)
