"""Everything that decides a training run: the same `Run` gives the same numbers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from tidegate._json import content_hash, decode_part, require_object
from tidegate._validation import InputError, require_choice, require_positive, require_size
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.lab.tasks.catalogue import task_from_dict
from tidegate.lab.tasks.task import Task

ModelConfig: TypeAlias = TransformerConfig | VisionConfig

Role: TypeAlias = Literal["comparison", "tuning"]
"""Whether a run is one of those compared, or helped to choose a learning rate."""


Precision: TypeAlias = Literal["fp32", "bf16"]
OptimizerName: TypeAlias = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is trained: under a warm-up and a cosine; by default with AdamW in float32."""

    steps: int
    """Updates."""
    batch_size: int = 32
    """Sequences, or images, of an update."""
    lr: float = 3e-3
    """The largest learning rate."""
    gate_lr: float = 1.0
    """The gates' learning rate as a multiple of `lr`."""
    weight_decay: float = 0.1
    """Of matrices; gates, norms and biases have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    final_lr: float = 0.1
    """The learning rate at the end, as a share of `lr`."""
    clip: float = 1.0
    """Largest norm of a gradient; longer ones are shortened."""
    num_evaluations: int = 8
    """Times that the validation loss is taken, evenly spread, the last at the end."""
    num_observations: int = 5
    """Times that gates and attention are looked at on the task's probe, evenly spread, the last at the end."""
    num_threads: int = 1
    """Of each run: several runs side by side are faster than one on several threads, while models are small."""
    device: str = "cpu"
    precision: Precision = "fp32"
    """`bf16` runs the model under autocast; weights, their updates and the gates' logits stay float32."""
    compile: bool = False
    """Whether the blocks are compiled by `torch.compile`."""
    accumulate: int = 1
    """Parts that a batch is cut into, by rows; their gradients add up to one update, in the memory of one part."""
    optimizer: OptimizerName = "adamw"
    """`muon` updates the matrices inside blocks by Muon, and all else by AdamW."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_evaluations", "num_observations", "num_threads", "accumulate"):
            require_size(name, getattr(self, name))
        for name in ("lr", "gate_lr", "clip"):
            require_positive(name, getattr(self, name))
        for name in ("weight_decay", "warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, expected="in [0, 1]", got=getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(name, expected="in [0, 1)", got=getattr(self, name))
        require_choice("precision", self.precision, get_args(Precision))
        require_choice("optimizer", self.optimizer, get_args(OptimizerName))
        if self.batch_size % self.accumulate:
            raise InputError("accumulate", expected=f"a divisor of batch_size={self.batch_size}", got=self.accumulate)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; later fields only if not at their defaults, so that older runs keep their hashes."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        unused = {
            option.name for option in fields(self) if option.name in _LATER and values[option.name] == option.default
        }
        return {name: value for name, value in values.items() if name not in unused}

    def lr_share(self, step: int) -> float:
        """The learning rate of a step, counted from 0, as a share of `lr`: a line up, then half a cosine down."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        progress = (step + 1 - warmup) / (self.steps - warmup)
        return self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2

    def evaluates_after(self, step: int) -> bool:
        """Whether the validation loss is taken after a step, counted from 0."""
        return _marks(step, self.num_evaluations, self.steps)

    def observes_after(self, step: int) -> bool:
        """Whether gates and attention are looked at after a step, counted from 0."""
        return _marks(step, self.num_observations, self.steps)


_LATER = ("precision", "compile", "accumulate", "optimizer")
"""Fields of `Training` that older records do not have."""


def _model_from_dict(values: Any) -> ModelConfig:
    return decode_part(VisionConfig if "image_size" in require_object(values) else TransformerConfig, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One model, trained once."""

    variant: str
    """The name of what is compared."""
    block: int
    """Which row of the design: the runs of a block, one a variant, are compared with each other."""
    seed: int
    """Decides initial values, batches and dropout."""
    model: ModelConfig = field(metadata={"decode": _model_from_dict})
    task: Task = field(metadata={"decode": task_from_dict})
    training: Training
    role: Role = "comparison"
    _read: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """The values that it was read from: older runs lack later fields, and their ids are those of what they have."""

    @property
    def id(self) -> str:
        """Hash of the content, less where the data lies: its fingerprint stands for it."""
        return content_hash(self.to_dict(location=False))

    @property
    def label(self) -> str:
        """The name of the run while it is under way; runs that tune differ in their settings."""
        setting = f" at lr {self.training.lr:g}, init {self.model.init}" if self.role == "tuning" else ""
        return f"{self.variant}{setting}"

    @classmethod
    def from_dict(cls, values: Any) -> Run:
        """Return the run that `to_dict` described, by errors that name fields relative to it."""
        run: Run = decode_part(cls, values)
        object.__setattr__(run, "_read", values)
        return run

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """Return plain JSON values; those that it was read from, if it was."""
        if self._read is not None:
            kept = self.task.to_dict(location=location)
            return {**self._read, "task": {name: item for name, item in self._read["task"].items() if name in kept}}
        return {
            "variant": self.variant,
            "block": self.block,
            "seed": self.seed,
            "role": self.role,
            "model": json.loads(self.model.to_json()),
            "task": self.task.to_dict(location=location),
            "training": self.training.to_dict(),
        }


def _marks(step: int, times: int, steps: int) -> bool:
    """Whether one of `times` evenly spread marks, the last at the last step, lies in this step."""
    return (step + 1) * times // steps > step * times // steps
