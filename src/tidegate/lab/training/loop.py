"""The training loop of runs and studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Schedule: TypeAlias = Callable[[int], float]
"""Returns the share of every learning rate for a step, counted from 0."""

_Batch = TypeVar("_Batch")


class StepMetrics(NamedTuple):
    """The metrics of one training step."""

    loss: float
    """Of the batch, before the update."""
    norm: float
    """Of the whole gradient, before clipping."""
    gate_norm: float
    """Of the gradient of the gates; 0 without gates."""


def take_step(
    losses: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    share: float,
    clip: float | None,
    parameters: Iterable[nn.Parameter],
    gates: Iterable[nn.Parameter] = (),
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> StepMetrics:
    """Make one update from the parts of a loss; a generator frees the activations of each part before the next.

    `share` is the current share of the peak learning rates, and a `clip` of None does not clip. `gates` are the
    parameters whose gradient norm is also returned; `mean` averages the loss over all processes.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
    optimizer.zero_grad()
    parts: list[Tensor] = []
    for loss in losses:
        loss.backward()
        parts.append(loss.detach())
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    parameters = list(parameters)
    gate_norm, norm = _gradient_norm(gates), _gradient_norm(parameters)
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    optimizer.step()
    return StepMetrics(mean(total).item(), norm.item(), gate_norm.item())


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
"""Number of preceding steps that a spike is compared with."""


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Return whether a loss lies five standard deviations above the median of the preceding steps.

    The standard deviation is estimated from the median absolute deviation, so that one spike does not hide the next.
    With fewer than `NUM_BEFORE_SPIKE` preceding steps there is no spike.
    """
    if len(before) < NUM_BEFORE_SPIKE:
        return False
    middle = median(before)
    spread = median(abs(value - middle) for value in before)
    return loss > middle + 5 * _NORMAL_DEVIATION * spread


_NORMAL_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


def warmup_and_linear_decay(num_steps: int, *, warmup: int = 20) -> Schedule:
    """Return a schedule that rises linearly over the warm-up and decays linearly to 0."""
    return lambda step: min(1.0, (step + 1) / warmup) * (1 - step / num_steps)
