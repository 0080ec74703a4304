"""One run of one variant at a size of model, as `tidegate train` makes it: nothing is matched, tuned or repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate._validation import InputError
from tidegate.config import TransformerConfig
from tidegate.lab.compare.design import num_parameters
from tidegate.lab.compare.variants import model_options, training_options
from tidegate.lab.tasks.text import text_task
from tidegate.lab.training.engine.loss import require_independent_rows
from tidegate.lab.training.presets import ModelSize, learning_rate, token_budget
from tidegate.lab.training.records import Variant
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
    """Return the run of a variant on text, which is opened for it and not read through.

    Args:
        variant: The gate, with options of its own.
        size: Of the model and its batches.
        data: The text, a path as `text_task` takes it; None reads Python's own sources.
        field: Where `.jsonl` lines and datasets have their text.
        budget: Tokens to train on; None takes twenty for each parameter.
        lr: The largest learning rate; None takes that of the width, and the variant's own comes before both.
        seed: Of initial values and batches.
        model: More options of the model's configuration.
        engine: More options of `Training`, which come before the variant's own.
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
