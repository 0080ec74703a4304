"""What gates and attention do in a model, measured on a few examples.

Legend: B batch, T positions, H heads, D head width, M model width.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.lab.tasks.task import NO_TARGET, Batch
from tidegate.lab.training.model import Model, row_parts
from tidegate.lab.training.records import GateObservation, Observation
from tidegate.torch.attention import AttentionTrace
from tidegate.torch.observing.statistics import AttentionStatistics, attention_statistics

_CLOSED = 0.1
"""A gate below this lets little through."""
_NUM_STRETCHES = 32
"""Points of a curve over positions."""


@torch.no_grad()
def observe(model: Model, batch: Batch, *, tokens: int) -> Observation | None:
    """What attention, gates and the residual stream do on a batch; `tokens` says when in the training.

    None if a number is not finite: a model that diverges has nothing left to look at.
    """
    model.eval()
    with _streams(model) as streams:
        _, traces = model(batch.inputs, return_traces=True)
    model.train()
    if not all(bool(stream.isfinite().all()) for stream in streams):
        return None
    statistics = [_statistics(trace) for trace in traces]
    sites = sorted({site for trace in traces for site in trace.gates})
    causal = model.config.causal
    observation = Observation(
        tokens=tokens,
        entropy=tuple(_by_head(layer.entropy, causal) for layer in statistics),
        sink_mass=tuple(_by_head(layer.mass, causal) for layer in statistics),
        sink_impact=tuple(_by_head(layer.impact, causal) for layer in statistics),
        gates={site: _gate_observation([_as_heads(trace.gates[site]) for trace in traces]) for site in sites},
        largest_activation=tuple(float(stream.abs().max()) for stream in streams),
        effective_rank=tuple(_effective_rank(stream) for stream in streams),
    )
    return observation if _is_finite(asdict(observation)) else None


@torch.no_grad()
def loss_by_position(model: Model, batch: Batch) -> tuple[tuple[float, float], ...]:
    """The mean loss of each of some stretches of positions, by the middle of the stretch, where it is finite."""
    model.eval()
    losses = torch.cat([_losses(model, part) for part in row_parts(model, batch)])
    model.train()
    counted = batch.targets != NO_TARGET
    stretches = torch.arange(losses.shape[1]).chunk(_NUM_STRETCHES)
    means = [float(losses[:, positions].sum() / counted[:, positions].sum()) for positions in stretches]
    middles = [float(positions.double().mean()) + 1 for positions in stretches]
    return tuple((middle, mean) for middle, mean in zip(middles, means, strict=True) if math.isfinite(mean))


def _losses(model: Model, batch: Batch) -> Tensor:
    """(B, T), 0 where there is no target."""
    logits = model(batch.inputs)
    assert isinstance(logits, Tensor)
    return F.cross_entropy(logits.mT, batch.targets, reduction="none", ignore_index=NO_TARGET)


@contextmanager
def _streams(model: Model) -> Generator[list[Tensor]]:
    """The residual stream after each block, (B, T, M), as the model runs."""
    streams: list[Tensor] = []

    def keep(_module: object, _arguments: object, result: tuple[Tensor, AttentionTrace] | Tensor) -> None:
        streams.append(result[0] if isinstance(result, tuple) else result)

    hooks = [block.register_forward_hook(keep) for block in model.stack.blocks]
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()


def _statistics(trace: AttentionTrace) -> AttentionStatistics:
    return attention_statistics(
        trace.query, trace.key, trace.value, mask=trace.mask, causal=trace.causal, scale=trace.scale
    )


def _by_head(values_BHT: Tensor, causal: bool) -> tuple[float, ...]:
    # The first query of a causal row sees itself alone, whatever the model does.
    counted = values_BHT[:, :, 1:] if causal else values_BHT
    return tuple(counted.mean(dim=(0, 2)).tolist())


def _as_heads(gate: Tensor) -> Tensor:
    """A gate's values as (B, T, H, D); at the dense site there is one head."""
    return gate.unsqueeze(-2) if gate.ndim == 3 else gate


def _gate_observation(layers: list[Tensor]) -> GateObservation:
    return GateObservation(
        mean=tuple(tuple(gate.mean(dim=(0, 1, 3)).tolist()) for gate in layers),
        below=tuple(tuple((gate < _CLOSED).to(gate.dtype).mean(dim=(0, 1, 3)).tolist()) for gate in layers),
        spread=tuple(tuple(gate.flatten(0, 1).std(dim=0).mean(dim=-1).tolist()) for gate in layers),
    )


def _effective_rank(stream_BTM: Tensor) -> float:
    rows = stream_BTM.flatten(0, 1).double()
    # The singular values of many rows, from the small matrix of their products.
    squared = torch.linalg.eigvalsh(rows.mT @ rows).clamp(min=0)
    shares = squared.sqrt() / squared.sqrt().sum()
    return float(torch.special.entr(shares).sum().exp())


def _is_finite(value: Any) -> bool:
    """Whether every number in nested dictionaries and tuples is finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, tuple) else math.isfinite(value)
