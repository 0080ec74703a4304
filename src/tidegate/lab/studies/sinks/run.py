"""Measure how much attention goes to the first key, to a sink and to the other keys.

Small byte-level models are trained on Python's own sources, one per gate and seed. Models of one seed share initial
weights and batches. A start token precedes each window: it is the first key, and heads without a sink can place their
excess attention on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.drawing import GREY, label_axes, new_figure
from tidegate.lab.studies.options import require_at_least, require_gates
from tidegate.lab.studies.study import Study
from tidegate.lab.tasks.task import Batch
from tidegate.lab.tasks.text import TextData, text_task
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.loop import train, warmup_and_linear_decay
from tidegate.lab.training.observe import summarize_observation
from tidegate.lab.training.records import LayerByHead
from tidegate.report.page import Column, Section, Table
from tidegate.tensors.palette import BLUE, VERMILION
from tidegate.torch import TransformerLM, observe
from tidegate.torch.gate_groups import gate_optimizer_groups

_SHARES = {"first key": VERMILION, "sink": BLUE, "other keys": "#D9D9D9"}
_READABLE = 0.09
"""Minimum share of a bar that is labeled with its number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinksOptions:
    """Sizes of the models and of their training."""

    gates: tuple[str, ...] = ("none", "sink", "off-by-one", "g1", "bma")
    d_model: int = 64
    num_heads: int = 4
    num_layers: int = 3
    length: int = 64
    """Bytes per window, without the start token."""
    steps: int = 700
    batch_size: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    """Applies to matrices; gates, sinks and norms do not decay."""
    num_validation_tokens: int = 16_384
    num_seeds: int = 2

    def __post_init__(self) -> None:
        require_gates(self.gates)
        require_at_least(self, steps=1, batch_size=1, length=2, num_seeds=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A trained model on the validation text: means over queries, by layer and head."""

    gate: str
    seed: int
    loss: float
    """In nats per byte."""
    first_key: LayerByHead
    """Attention weight on the first key."""
    sink: LayerByHead | None
    """Attention weight on the sink; None without a sink."""
    contribution: LayerByHead
    """Norm of the first key's contribution to the layer's output, relative to that output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinksResult:
    """All models."""

    options: SinksOptions
    models: tuple[TrainedModel, ...]

    def of(self, gate: str) -> tuple[TrainedModel, ...]:
        """Return the models with that gate, one per seed."""
        return tuple(model for model in self.models if model.gate == gate)

    @property
    def even_share(self) -> float:
        """Return the mean weight on the first key of a head with uniform attention."""
        return statistics.fmean(1 / keys for keys in range(2, self.options.length + 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Means of one gate over layers, heads and seeds."""

    loss: float
    first_key: float
    strongest: float
    """Largest weight on the first key of any head, averaged over seeds."""
    sink: float | None
    """None without a sink."""
    contribution: float

    @property
    def other_keys(self) -> float:
        """Return the remaining weight."""
        return 1 - self.first_key - (self.sink or 0.0)


def run_sinks(options: SinksOptions, *, tell: Tell = ignore) -> SinksResult:
    """Train a model for each gate and seed, and observe its attention."""
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
    """Return the values of all heads of all layers, model by model; a model without the statistic adds none."""
    return [value for rows in maps for row in rows or () for value in row if value is not None]


def finding(result: SinksResult) -> str:
    """State the result in sentences."""
    parts = []
    for gate in result.options.gates:
        shares = shares_of(result.of(gate))
        sink = "" if shares.sink is None else f", {shares.sink:.3f} on the sink"
        parts.append(
            f"{gate} {shares.first_key:.3f} on the first key ({shares.strongest:.3f} in the strongest head), "
            f"contribution {shares.contribution:.3f}{sink}, loss {shares.loss:.3f}"
        )
    seeds = f"{result.options.num_seeds} seeds" if result.options.num_seeds > 1 else "One seed"
    return (
        f"Attention weights, means over layers, heads and seeds; uniform attention would put {result.even_share:.3f} "
        f"on the first key. {'; '.join(parts)}. {seeds} of small models: descriptive, without a significance test."
    )


def _train(gate: str, seed: int, data: TextData, options: SinksOptions) -> TransformerLM:
    model = TransformerLM(
        TransformerConfig(
            gate=gate,
            d_model=options.d_model,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            max_length=options.length + 1,
            # The last token is the start token.
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


def view(result: SinksResult) -> tuple[Section, ...]:
    """Return a table of the mean attention shares by gate."""
    options = result.options
    columns = (
        Column(title="gate"),
        Column(title="loss", unit="nats/byte", digits=3, better="low"),
        Column(title="first key", digits=3, help="Mean over layers, heads and queries."),
        Column(title="first key, strongest head", digits=3),
        Column(title="sink", digits=3),
        Column(title="other keys", digits=3),
        Column(title="contribution of the first key", digits=3, help="Relative to the layer's output."),
    )
    rows = tuple(
        (gate, shares.loss, shares.first_key, shares.strongest, shares.sink, shares.other_keys, shares.contribution)
        for gate in options.gates
        for shares in [shares_of(result.of(gate))]
    )
    lead = (
        f"{options.num_layers} layers of {options.num_heads} heads, {options.steps} steps of {options.batch_size} × "
        f"{options.length} bytes after a start token, {options.num_seeds} seeds."
    )
    table = Table(title="Attention weights, means over seeds", columns=columns, rows=rows)
    return (Section(title="Attention weights", lead=lead, panels=(table,)),)


def figures(result: SinksResult) -> dict[str, Figure]:
    """Draw the attention shares by gate, and for each head the weights on first key and sink and the contribution."""
    gates = result.options.gates
    figure = new_figure(10.4, 1.1 + 0.42 * len(gates))
    shares, *by_head = figure.subplots(1, 4, sharey=True, width_ratios=(1.2, 1, 1, 1))
    label_axes(shares, title="All weight, mean over heads", x="share of the weight")
    for place, gate in enumerate(gates):
        _draw_shares(shares, place, shares_of(result.of(gate)))
    panels = {
        "Weight on the first key": ("share of the weight", "first_key", VERMILION),
        "Weight on the sink": ("share of the weight", "sink", BLUE),
        "What the first key adds": ("size, in units of the layer's output", "contribution", VERMILION),
    }
    for axes, (title, (x, name, color)) in zip(by_head, panels.items(), strict=True):
        label_axes(axes, title=title, x=x)
        for place, gate in enumerate(gates):
            _draw_heads(axes, place, heads_of(getattr(model, name) for model in result.of(gate)), color)
        axes.set_xlim(left=0)
    by_head[0].axvline(result.even_share, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
    shares.set_xlim(0, 1)
    shares.grid(visible=False)
    shares.set_yticks(range(len(gates)), gates, fontsize=8)
    shares.invert_yaxis()
    handles = [
        *(Patch(color=color, label=label) for label, color in _SHARES.items()),
        Line2D([], [], color=GREY, marker="o", markersize=3, linestyle="", label="one head of one seed"),
        Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=1.4, linestyle="", label="mean"),
        Line2D([], [], color=GREY, linewidth=0.9, linestyle="--", label="if all keys had equal weight"),
    ]
    figure.legend(handles=handles, fontsize=7, frameon=False, loc="outside lower center", ncols=6)
    return {"sinks.svg": figure}


def _draw_shares(axes: Any, place: int, shares: Shares) -> None:
    """Draw a bar of length 1, divided into the first key, the sink and all other keys."""
    start = 0.0
    widths = (shares.first_key, shares.sink or 0.0, shares.other_keys)
    for share, color in zip(widths, _SHARES.values(), strict=True):
        axes.barh(place, share, left=start, color=color, height=0.62)
        if share > _READABLE:
            ink = "white" if color == BLUE else "black"
            axes.text(start + share / 2, place, f"{share:.2f}", ha="center", va="center", fontsize=7, color=ink)
        start += share


def _draw_heads(axes: Any, place: int, values: list[float], color: str) -> None:
    """Draw a dot per head and seed and a line at their mean, or a note without values."""
    if not values:
        axes.text(0.02, place, "no sink", transform=axes.get_yaxis_transform(), va="center", fontsize=7, color=GREY)
        return
    heights = place + np.linspace(-0.26, 0.26, len(values))
    axes.plot(values, heights, "o", color=color, markersize=3, alpha=0.75, markeredgewidth=0)
    axes.vlines(np.mean(values), place - 0.36, place + 0.36, color="black", linewidth=1.4)


STUDY = Study(
    name="sinks",
    question=QUESTIONS["sinks"],
    claim="The bilinear-modulation note, arXiv 2505.06708 and arXiv 2602.01468 claim that query-conditioned gating "
    "lowers the weight on the first token, or its effect on the output. Treating a sink as a gate is our own.",
    options=SinksOptions(),
    result=SinksResult,
    run=run_sinks,
    finding=finding,
    view=view,
    figures=figures,
)
