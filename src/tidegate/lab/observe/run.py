"""A language model observed on windows of tokens, batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidegate.lab.models.language_models import LanguageModel
from tidegate.torch.observing import Observation, observe


@torch.no_grad()
def model_observation(
    model: LanguageModel,
    windows: Tensor,
    *,
    batch_size: int,
    keys: int = 1,
    heat: bool = False,
    tell: Callable[[int, int], None] = lambda _done, _whole: None,
) -> Observation:
    """Observe a model on all windows, batch by batch.

    windows : (count, length) tokens
    keys    : how many of the first keys are the sink; at most `length`
    heat    : whether to measure the largest score and the heat capacity too
    tell    : hears after each batch how many windows are done, and of how many
    """
    if not 1 <= keys <= windows.shape[1]:
        raise ValueError(f"--keys must be from 1 to the {windows.shape[1]} tokens of a sequence; got {keys}.")
    done = 0
    with observe(model.module, keys=keys, heat=heat) as watcher:
        for batch in windows.split(batch_size):
            model.run(batch)
            done += len(batch)
            tell(done, len(windows))
    try:
        return watcher.observation()
    except RuntimeError as problem:
        raise ValueError(f"MODEL {model.name}: {problem}") from problem
