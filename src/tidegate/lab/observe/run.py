"""A language model observed on windows of tokens, batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.lab.models.language_models import LanguageModel
from tidegate.lab.training.events import PartsDone, Tell, ignore
from tidegate.torch.observing import Observation, observe


@torch.no_grad()
def model_observation(
    model: LanguageModel,
    windows: Tensor,
    *,
    batch_size: int,
    keys: int = 1,
    heat: bool = False,
    tell: Tell = ignore,
) -> Observation:
    """Observe a model on all windows, batch by batch.

    windows : (count, length) tokens
    keys    : how many of the first keys are the key set; at most `length`
    heat    : whether to measure the largest score and the heat capacity too
    tell    : receives a `PartsDone` at the beginning and after each batch
    """
    if not 1 <= keys <= windows.shape[1]:
        raise ValueError(f"--keys must be from 1 to the {windows.shape[1]} tokens of a sequence; got {keys}.")
    done = 0
    tell(_progress(done, windows))
    with observe(model.module, keys=keys, heat=heat) as watcher:
        for batch in windows.split(batch_size):
            model.run(batch)
            done += len(batch)
            tell(_progress(done, windows))
    try:
        return watcher.observation()
    except RuntimeError as problem:
        raise ValueError(f"MODEL {model.name}: {problem}") from problem


def _progress(done: int, windows: Tensor) -> PartsDone:
    return PartsDone(work="observing", done=done, total=len(windows), unit="sequence")
