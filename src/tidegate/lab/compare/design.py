"""The runs of a comparison: one of each variant, made equal, tuned, and repeated under every seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tidegate._json import content_hash
from tidegate.lab.compare.request import PRESETS, Request
from tidegate.lab.training.machine import environment
from tidegate.lab.training.model import build_model, training_flops
from tidegate.lab.training.records import Costs, Plan, Record
from tidegate.lab.training.run import ModelConfig, Run


def make_plan(request: Request, base: dict[str, Run]) -> Plan:
    """Make the first line of the records: all that decides numbers, and how to ask for it again."""
    data = request.task.load()
    variants = tuple(variant.plan() for variant in request.variants)
    decisive: dict[str, Any] = {
        "variants": [asdict(variant) for variant in variants],
        "base": [run.id for run in base.values()],
        "num_seeds": request.num_seeds,
        "match": request.match,
        "tune_lr": request.tune_lr,
        "margin": request.margin,
        "runs": [run.id for run in request.runs],
    }
    return Plan(
        command=request.command,
        variants=variants,
        control=request.control.name,
        num_seeds=request.num_seeds,
        match="runs" if request.runs else request.match,
        margin=request.margin,
        tuned_lr=request.tune_lr,
        task=data.facts,
        description=data.description,
        preset="runs" if request.runs else request.preset,
        budget=request.budget or PRESETS[request.task.kind][request.preset].budget,
        request=content_hash(decisive),
        environment=environment(),
    )


def base_runs(request: Request) -> dict[str, Run]:
    """One run of each variant, its first, as it would be if nothing were matched or tuned."""
    if request.runs:
        # Reversed, so that the first run of a variant is the one that stays.
        return {run.variant: run for run in reversed(request.runs)}
    data, preset = request.task.load(), PRESETS[request.task.kind][request.preset]
    training = preset.training(request.task, request.budget)
    runs = {
        variant.name: Run(
            variant=variant.name,
            block=0,
            seed=variant.first_seed,
            model=preset.model(request.task, data, variant.gates),
            task=request.task,
            training=replace(training, device=request.device, **variant.overrides),
        )
        for variant in request.variants
    }
    if request.match == "params":
        target = num_parameters(runs[request.control.name].model)
        runs = {name: replace(run, model=match_parameters(run.model, target)) for name, run in runs.items()}
    return runs


def design_runs(request: Request, base: dict[str, Run], costs: Costs) -> list[Run]:
    """Every variant under every seed, block by block, with the steps that make them equal in FLOPs or time."""
    control = base[request.control.name]
    if request.match == "flops":
        base = {name: match_flops(run, control) for name, run in base.items()}
    if request.match == "time":
        ratios = {cost.variant: cost.time_ratio for cost in costs.items}
        base = {name: match_time(run, control, time_ratio=ratios[name]) for name, run in base.items()}
    return [
        replace(run, block=block, seed=run.seed + block) for block in range(request.num_seeds) for run in base.values()
    ]


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a model of this configuration learns, counted without allocating them."""
    with torch.device("meta"):
        return build_model(config).num_parameters()


def match_parameters(config: ModelConfig, target: int) -> ModelConfig:
    """Choose feed-forward widths that bring a configuration as near as can be to `target` parameters.

    The blocks' widths differ by at most one, the first blocks being the wider.
    """
    blocks = config.num_layers
    # Parameters grow by one and the same number for each inner channel of any block.
    thinnest, thicker = (num_parameters(replace(config, d_ff=(width,) + (1,) * (blocks - 1))) for width in (1, 2))
    channels = blocks + round((target - thinnest) / (thicker - thinnest))
    if channels < blocks:
        raise ValueError(
            f"match 'params' cannot bring the gate {config.gate} down to {target:,} parameters: with feed-forward "
            f"layers of one channel it still has {thinnest:,}. Use a larger preset, or match tokens."
        )
    width, wider = divmod(channels, blocks)
    return replace(config, d_ff=(width + 1,) * wider + (width,) * (blocks - wider))


def match_flops(run: Run, control: Run) -> Run:
    """Give a run as many steps as cost the control's training FLOPs."""
    with torch.device("meta"):
        spent, wanted = (training_flops(build_model(config)) for config in (run.model, control.model))
    return _with_steps(run, control.training.steps * wanted / spent)


def match_time(run: Run, control: Run, *, time_ratio: float) -> Run:
    """Give a run as many steps as take the control's time, if a step takes `time_ratio` times as long."""
    return _with_steps(run, control.training.steps / time_ratio)


def _with_steps(run: Run, steps: float) -> Run:
    return replace(run, training=replace(run.training, steps=max(1, round(steps))))


GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of a variant's own learning rate."""

_SHARE = 0.2
"""Of a run's steps."""
_NUM_SEEDS = 2
_FIRST_TUNING_SEED = 1_000_000
"""Seeds of tuning begin here, or after those of the comparison if they reach as far."""


def tuning_runs(base: Mapping[str, Run], *, num_seeds: int) -> list[Run]:
    """Short runs of every variant over the grid.

    base      : the first run of each variant
    num_seeds : how many the comparison takes, from the first run's on
    """
    first = num_seeds + max(_FIRST_TUNING_SEED, *(run.seed for run in base.values()))
    return [
        replace(
            run,
            block=trial,
            seed=first + trial,
            role="tuning",
            training=replace(
                run.training,
                lr=run.training.lr * multiple,
                steps=max(1, round(_SHARE * run.training.steps)),
                num_evaluations=1,
                num_observations=1,
            ),
        )
        for trial in range(_NUM_SEEDS)
        for run in base.values()
        for multiple in GRID
    ]


def choose_rates(records: Iterable[Record]) -> dict[str, float]:
    """Choose for each variant the learning rate of the lowest mean loss, one at which no run diverged.

    A variant that diverged at every rate gets the lowest: that it diverges is for the comparison to show.
    """
    losses: dict[str, dict[float, list[float]]] = {}
    for record in records:
        rate = record.run["training"]["lr"]
        loss = math.inf if record.loss is None else record.loss
        losses.setdefault(record.run["variant"], {}).setdefault(rate, []).append(loss)
    chosen: dict[str, float] = {}
    for variant, by_rate in losses.items():
        chosen[variant] = min(sorted(by_rate), key=lambda rate: sum(by_rate[rate]))
    return chosen
