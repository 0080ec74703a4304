"""An `Observer` in the transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from tidegate.torch.observing.observer import Observer


class ObserverCallback(TrainerCallback):
    """Pass the trainer's steps to an observer of its model: `Trainer(..., callbacks=[ObserverCallback(observer)])`.

    Accumulated batches are one step, as the trainer counts. If a run fails inside an observed step, the model is
    observed until `observer.abandon()` or the next run.
    """

    def __init__(self, observer: Observer) -> None:
        if not isinstance(observer, Observer):
            raise TypeError(f"observer must be an Observer, got {type(observer).__name__}.")
        self.observer = observer

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Discard an unfinished step of an earlier run."""
        self.observer.abandon()

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Observe the step if it is due."""
        self.observer.begin(state.global_step)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Store the observation."""
        self.observer.end()
