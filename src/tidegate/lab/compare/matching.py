"""Making variants equal in what is named, so that only the gate differs."""

from __future__ import annotations

from dataclasses import replace

import torch

from tidegate.lab.training.model import build_model, training_flops
from tidegate.lab.training.run import ModelConfig, Run


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a model of this configuration learns; none of them is made."""
    with torch.device("meta"):
        return build_model(config).num_parameters()


def matched_parameters(config: ModelConfig, target: int) -> ModelConfig:
    """The configuration with feed-forward widths such that it has as near as can be to `target` parameters.

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


def matched_flops(run: Run, control: Run) -> Run:
    """The run with as many steps as cost the control's training FLOPs."""
    with torch.device("meta"):
        spent, wanted = (training_flops(build_model(config)) for config in (run.model, control.model))
    return _with_steps(run, control.training.steps * wanted / spent)


def matched_time(run: Run, control: Run, *, time_ratio: float) -> Run:
    """The run with as many steps as take the control's time, when one takes `time_ratio` times as long."""
    return _with_steps(run, control.training.steps / time_ratio)


def _with_steps(run: Run, steps: float) -> Run:
    return replace(run, training=replace(run.training, steps=max(1, round(steps))))
