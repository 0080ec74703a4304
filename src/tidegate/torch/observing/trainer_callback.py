"""An `Observer` in the transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from tidegate.torch.observing.observer import Observer


class ObserverCallback(TrainerCallback):
    """Hands the trainer's steps to an observer of its model: `Trainer(..., callbacks=[ObserverCallback(observer)])`.

    A step is counted as the trainer counts it, all of its accumulated batches together. If a run breaks off inside a
    step that is watched, the model is watched until `observer.abandon()` or the next run.
    """

    def __init__(self, observer: Observer) -> None:
        if not isinstance(observer, Observer):
            raise TypeError(
                f"observer must be an Observer; got {type(observer).__name__}. Make one of the model first."
            )
        self.observer = observer

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Drop a step that an earlier run broke off."""
        self.observer.abandon()

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Watch the step if it is due."""
        self.observer.begin(state.global_step)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep what was seen."""
        self.observer.end()
