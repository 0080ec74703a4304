"""Observe a language model on windows of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tidegate._validation import InputError
from tidegate.lab.models.language_models import LanguageModel
from tidegate.lab.training.events import PartsDone, Tell, ignore
from tidegate.torch.observing import Observation, observe


@torch.no_grad()
def model_observation(
    model: LanguageModel, windows: Tensor, *, batch_size: int, keys: int = 1, heat: bool = False, tell: Tell = ignore
) -> Observation:
    """Observe a model on all windows (count, length) of tokens, batch by batch.

    The key set has the first `keys` keys, at most `length`; `heat` adds the largest score and the heat capacity. A
    `PartsDone` is reported at the start and after each batch.

    Raises:
        InputError: The key set does not fit the windows, or no attention of the model can be observed.
    """
    if not 1 <= keys <= windows.shape[1]:
        raise InputError("keys", expected=f"from 1 to {windows.shape[1]}, the tokens of a sequence", got=keys)
    progress = PartsDone(work="observing", done=0, total=len(windows), unit="sequence")
    tell(progress)
    with observe(model.module, keys=keys, heat=heat) as watcher:
        for batch in windows.split(batch_size):
            model.run(batch)
            progress = replace(progress, done=progress.done + len(batch))
            tell(progress)
    try:
        return watcher.observation()
    except RuntimeError as problem:
        expected = "a model with attention calls that can be observed"
        raise InputError("model", expected=expected, got=model.name, hint=str(problem)) from problem
