"""One run of one variant at a size of model, as `tidegate train` makes it: nothing is matched, tuned or repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.config import TransformerConfig
from tidegate.lab.compare.design import num_parameters
from tidegate.lab.compare.variants import Variant
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.engine.loss import require_independent_rows
from tidegate.lab.training.presets import ModelSize, learning_rate, token_budget
from tidegate.lab.training.run import Run, Training


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
    """The run of a variant on text, which is opened for it and not read through.

    data : where the text is, as `tidegate train --data` takes it; None reads Python's own sources
    field : where `.jsonl` lines and datasets have their text
    budget : tokens to train on; None takes twenty for each parameter
    lr : the largest learning rate; None takes that of the width, and the variant's own comes before both
    model : more options of the model's configuration
    engine : more options of `Training`, which come before the variant's own
    """
    if variant.params is not None or variant.first_seed:
        raise ValueError(f"variant {variant.name} has options of a comparison, params or first_seed. Leave them out.")
    task = text_task(data, tokenizer=size.tokenizer, field=field, length=size.length)
    config = TransformerConfig(
        gate=variant.gates,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        vocab_size=task.open().vocab_size,
        max_length=size.length,
        **(model or {}),
        **variant.model,
    )
    tokens = token_budget(num_parameters(config)) if budget is None else budget
    training: dict[str, Any] = {
        "lr": learning_rate(size.d_model) if lr is None else lr,
        **variant.training,
        **(engine or {}),
    }
    steps = max(1, round(tokens / (size.batch_size * size.length)))
    options = Training(steps=steps, batch_size=size.batch_size, **training)
    require_independent_rows(config, options)
    return Run(variant=variant.name, block=0, seed=seed, model=config, task=task, training=options)
