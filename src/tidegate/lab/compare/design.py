"""The runs of a comparison: one of each variant, made equal, and repeated under every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from tidegate._json import content_hash
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.tuning import Setting
from tidegate.lab.compare.variants import Variant
from tidegate.lab.tasks.task import TaskData, TaskFacts
from tidegate.lab.training.machine import environment
from tidegate.lab.training.model import build_model, training_flops
from tidegate.lab.training.records import Costs, Plan
from tidegate.lab.training.run import ModelConfig, Run


def make_plan(request: Request, base: dict[str, Run]) -> Plan:
    """Make the first line of the records: all that decides numbers, and how to ask for it again."""
    data = request.task.load()
    budget = request.budget or PRESETS[request.task.kind][request.preset].budget
    variants = tuple(variant.plan() for variant in request.variants)
    decisive: dict[str, Any] = {
        "variants": [asdict(variant) for variant in variants],
        "base": [run.id for run in base.values()],
        "num_seeds": request.num_seeds,
        "match": request.match,
        "grid": None if request.grid is None else asdict(request.grid),
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
        grid=request.grid,
        settings="" if request.settings is None else request.settings.in_words(budget=budget),
        task=TaskFacts.from_dict(data.facts),
        description=data.description,
        preset="runs" if request.runs else request.preset,
        budget=budget,
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
    _require_neighbours(request.variants, data)
    runs: dict[str, Run] = {}
    for variant in request.variants:
        run = Run(
            variant=variant.name,
            block=0,
            seed=variant.first_seed,
            model=preset.model(request.task, data, variant.gates),
            task=request.task,
            training=replace(training, device=request.device),
        )
        if request.settings is not None:
            run = request.settings.setting_of(variant.plan()).given_to(run)
        # What a variant sets for itself wins over what was tuned.
        runs[variant.name] = replace(
            run, model=replace(run.model, **variant.model), training=replace(run.training, **variant.training)
        )
    if request.match == "params":
        target = num_parameters(runs[request.control.name].model)
        return {name: replace(run, model=match_parameters(run.model, target)) for name, run in runs.items()}
    targets = {
        variant.name: num_parameters(runs[variant.params].model)
        for variant in request.variants
        if variant.params is not None
    }
    return {
        name: replace(run, model=match_parameters(run.model, targets[name])) if name in targets else run
        for name, run in runs.items()
    }


def _require_neighbours(variants: Sequence[Variant], data: TaskData) -> None:
    """Refuse variants that read another sequence of the batch if a single one is held out."""
    reading = [variant.name for variant in variants if variant.gates.read_other_sequences]
    if reading and len(data.probe().inputs) < 2:
        raise ValueError(
            f"{', '.join(reading)}: a shuffled gate reads the next sequence, and of this data a single one is held "
            "out. Give more with --data, make sequences shorter with --length, or leave the shuffled out."
        )


def match_steps(request: Request, base: dict[str, Run], costs: Costs) -> dict[str, Run]:
    """Give the runs the steps that make them equal in FLOPs or time, if that is asked for."""
    control = base[request.control.name]
    if request.match == "flops":
        return {name: match_flops(run, control) for name, run in base.items()}
    if request.match == "time":
        ratios = {cost.variant: cost.time_ratio for cost in costs.items}
        return {name: match_time(run, control, time_ratio=ratios[name]) for name, run in base.items()}
    return base


def design_runs(base: Mapping[str, Run], *, num_seeds: int, chosen: Mapping[tuple[str, int], Setting]) -> list[Run]:
    """Every variant under every seed, block by block, at the settings that were chosen for it there, if any were."""
    runs = [replace(run, block=block, seed=run.seed + block) for block in range(num_seeds) for run in base.values()]
    settings = ((run, chosen.get((run.variant, run.block))) for run in runs)
    return [run if setting is None else setting.given_to(run) for run, setting in settings]


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
