"""An `Observer` in the transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from tidegate.torch.observing.observer import Observer


class ObserverCallback(TrainerCallback):
    """Pass the trainer's steps to an observer of its model: `Trainer(..., callbacks=[ObserverCallback(observer)])`.

    A step is one of the trainer, with all of its accumulated batches. If a run fails inside a watched step, the model
    is watched until `observer.abandon()` or the next run.
    """

    def __init__(self, observer: Observer) -> None:
        if not isinstance(observer, Observer):
            raise TypeError(f"observer must be an Observer; got {type(observer).__name__}.")
        self.observer = observer

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Drop an unfinished step of an earlier run."""
        self.observer.abandon()

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Watch the step if it is due."""
        self.observer.begin(state.global_step)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep the observation."""
        self.observer.end()
