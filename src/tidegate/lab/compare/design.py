"""The runs of a comparison: one of each variant, matched, and repeated under every seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tidegate._json import content_hash
from tidegate._validation import InputError
from tidegate.config import TransformerConfig
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.tuning import Setting
from tidegate.lab.compare.variants import model_options, training_options
from tidegate.lab.tasks.task import TaskFacts
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.machine import environment
from tidegate.lab.training.model import build_model, require_independent_rows, training_flops
from tidegate.lab.training.presets import ModelSize, learning_rate, token_budget
from tidegate.lab.training.records import Costs, Plan, Variant
from tidegate.lab.training.run import ModelConfig, Run, Training


def make_plan(request: Request, base: dict[str, Run]) -> Plan:
    """Return the plan, the first line of the records: everything that determines the numbers, and its command."""
    data = request.task.load()
    budget = request.budget or PRESETS[request.task.kind][request.preset].budget
    decisive: dict[str, Any] = {
        "variants": [asdict(variant) for variant in request.variants],
        "base": [run.id for run in base.values()],
        "num_seeds": request.num_seeds,
        "match": request.match,
        "grid": None if request.grid is None else asdict(request.grid),
        "margin": request.margin,
        "runs": [run.id for run in request.runs],
    }
    return Plan(
        command=request.command,
        variants=request.variants,
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
    """Return the first run of each variant, before matching of steps and tuning."""
    if request.runs:
        # Reversed, so that the first run of each variant stays.
        return {run.variant: run for run in reversed(request.runs)}
    data, preset = request.task.load(), PRESETS[request.task.kind][request.preset]
    reading = [variant.name for variant in request.variants if variant.gates.read_other_sequences]
    if reading and len(data.probe().inputs) < 2:
        expected = "without shuffled gates, which read the next sequence, if only one sequence is held out"
        hint = "Use more data, shorter sequences, or no shuffled gates."
        raise InputError("variants", expected=expected, got=", ".join(reading), hint=hint)
    training = replace(preset.training(request.task, request.budget), device=request.device)
    runs: dict[str, Run] = {}
    for variant in request.variants:
        run = Run(
            variant=variant.name,
            block=0,
            seed=int(variant.overrides.get("first_seed", 0)),
            model=preset.model(request.task, data, variant.gates),
            task=request.task,
            training=training,
        )
        if request.settings is not None:
            run = request.settings.setting_of(variant).given_to(run)
        # A variant's own options override tuned ones.
        model, trained = model_options(variant), training_options(variant)
        runs[variant.name] = replace(run, model=replace(run.model, **model), training=replace(run.training, **trained))
    names = {variant.name: variant.overrides.get("params") for variant in request.variants}
    if request.match == "params":
        names = dict.fromkeys(names, request.control.name)
    # Counted before any variant is widened.
    targets = {name: num_parameters(runs[str(other)].model) for name, other in names.items() if other is not None}
    return runs | {
        name: replace(runs[name], model=match_parameters(runs[name].model, target)) for name, target in targets.items()
    }


def match_steps(request: Request, base: dict[str, Run], costs: Costs) -> dict[str, Run]:
    """Return the runs with the numbers of steps that match FLOPs or time, if requested."""
    control = base[request.control.name]
    steps = control.training.steps
    if request.match == "flops":
        with torch.device("meta"):
            flops = {name: training_flops(build_model(run.model)) for name, run in base.items()}
        wanted = flops[request.control.name]
        return {name: _with_steps(run, steps * wanted / flops[name]) for name, run in base.items()}
    if request.match == "time":
        ratios = {cost.variant: cost.time_ratio for cost in costs.items}
        return {name: _with_steps(run, steps / ratios[name]) for name, run in base.items()}
    return base


def design_runs(base: Mapping[str, Run], *, num_seeds: int, chosen: Mapping[tuple[str, int], Setting]) -> list[Run]:
    """Return the runs of all variants under all seeds, block by block, at the settings selected for each block."""
    runs = [replace(run, block=block, seed=run.seed + block) for block in range(num_seeds) for run in base.values()]
    settings = ((run, chosen.get((run.variant, run.block))) for run in runs)
    return [run if setting is None else setting.given_to(run) for run, setting in settings]


def single_run(
    variant: Variant,
    size: ModelSize,
    *,
    data: str | None = None,
    field: str | None = None,
    budget: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Run:
    """Return the run of a variant on text, which is opened but not read through.

    `data` and `field` are those of `text_task`. A budget of None takes twenty tokens per parameter, and an `lr` of None
    takes the default of the width; the variant's own rate overrides both. `model` and `engine` have more options of the
    model's configuration and of `Training`; those of `engine` override the variant's own.
    """
    if unused := {"params", "first_seed"} & set(variant.overrides):
        expected = "without params and first_seed, which are options of a comparison"
        raise InputError("variant", expected=expected, got=", ".join(sorted(unused)), hint="Leave them out.")
    task = text_task(data, tokenizer=size.tokenizer, field=field, length=size.length)
    config = TransformerConfig(
        gate=variant.gates,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        vocab_size=task.open().vocab_size,
        max_length=size.length,
        **(model or {}),
        **model_options(variant),
    )
    tokens = token_budget(num_parameters(config)) if budget is None else budget
    training: dict[str, Any] = {
        "lr": learning_rate(size.d_model) if lr is None else lr,
        **training_options(variant),
        **(engine or {}),
    }
    steps = max(1, round(tokens / (size.batch_size * size.length)))
    options = Training(steps=steps, batch_size=size.batch_size, **training)
    require_independent_rows(config, options)
    return Run(variant=variant.name, block=0, seed=seed, model=config, task=task, training=options)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model, without allocating them."""
    with torch.device("meta"):
        return build_model(config).num_parameters()


def match_parameters(config: ModelConfig, target: int) -> ModelConfig:
    """Return the configuration with the feed-forward widths that bring it closest to `target` parameters.

    Widths differ by at most one between blocks; the first blocks are the wider ones.
    """
    blocks = config.num_layers
    # Each inner channel of any block adds the same number of parameters.
    thinnest, thicker = (num_parameters(replace(config, d_ff=(width,) + (1,) * (blocks - 1))) for width in (1, 2))
    channels = blocks + round((target - thinnest) / (thicker - thinnest))
    if channels < blocks:
        expected = f"another budget: the gate {config.gate} leaves no room for {target:,} parameters"
        hint = f"With feed-forward layers of one channel there are {thinnest:,}. Use a larger preset, or match tokens."
        raise InputError("match", expected=expected, got="params", hint=hint)
    width, wider = divmod(channels, blocks)
    return replace(config, d_ff=(width + 1,) * wider + (width,) * (blocks - wider))


def _with_steps(run: Run, steps: float) -> Run:
    return replace(run, training=replace(run.training, steps=max(1, round(steps))))
