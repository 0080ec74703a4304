"""Everything that determines a training run: equal `Run`s give equal results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from tidegate._json import content_hash, decode_part, require_object
from tidegate._text import list_some
from tidegate._validation import InputError, require_choice, require_positive, require_size
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.lab.tasks.catalogue import task_from_dict
from tidegate.lab.tasks.task import Task

ModelConfig: TypeAlias = TransformerConfig | VisionConfig

Role: TypeAlias = Literal["comparison", "tuning"]
"""Whether a run is compared, or tunes a learning rate."""


Precision: TypeAlias = Literal["fp32", "bf16"]
OptimizerName: TypeAlias = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is trained: with warm-up and cosine decay; by default with AdamW in float32."""

    steps: int
    """Number of updates."""
    batch_size: int = 32
    """In sequences, or images."""
    lr: float = 3e-3
    """Peak learning rate."""
    gate_lr: float = 1.0
    """The gates' learning rate as a multiple of `lr`."""
    weight_decay: float = 0.1
    """For matrices; gates, norms and biases have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: float = 0.05
    """Share of the steps that warm up the learning rate."""
    final_lr: float = 0.1
    """The learning rate at the end, as a share of `lr`."""
    clip: float = 1.0
    """Maximum norm of a gradient; larger ones are clipped."""
    num_evaluations: int = 8
    """Number of validation losses, evenly spread, the last at the end."""
    num_observations: int = 5
    """Number of observations of the task's probe, evenly spread, the last at the end."""
    num_threads: int = 1
    """CPU threads of each run: for small models, several runs side by side are faster than one on several threads."""
    device: str = "cpu"
    precision: Precision = "fp32"
    """`bf16` runs the model under autocast; weights, updates and gate logits stay float32."""
    compile: bool = False
    """Whether the blocks are compiled by `torch.compile`."""
    accumulate: int = 1
    """Gradient accumulation: the number of micro-batches of an update."""
    optimizer: OptimizerName = "adamw"
    """`muon` updates the matrices inside blocks with Muon, everything else with AdamW."""

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
        """Return plain JSON values, later fields only if not at their defaults, so that older runs keep their ids."""
        values = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return {name: value for name, (value, default) in values.items() if name not in _LATER or value != default}

    def lr_share(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a share of `lr`: linear warm-up, cosine decay."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        progress = (step + 1 - warmup) / (self.steps - warmup)
        return self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2

    def evaluates_after(self, step: int) -> bool:
        """Return whether the validation loss is computed after a step, counted from 0."""
        return _marks(step, self.num_evaluations, self.steps)

    def observes_after(self, step: int) -> bool:
        """Return whether the probe is observed after a step, counted from 0."""
        return _marks(step, self.num_observations, self.steps)


_LATER = ("precision", "compile", "accumulate", "optimizer")
"""Fields of `Training` that older records lack."""


def _model_from_dict(values: Any) -> ModelConfig:
    return decode_part(VisionConfig if "image_size" in require_object(values) else TransformerConfig, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One model, trained once."""

    variant: str
    """The name of the variant."""
    block: int
    """Number of the seed; the runs of a block, one per variant, are compared with each other."""
    seed: int
    """Random seed for initialization, batches and dropout."""
    model: ModelConfig = field(metadata={"decode": _model_from_dict})
    task: Task = field(metadata={"decode": task_from_dict})
    training: Training
    role: Role = "comparison"
    _read: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)
    """The values that it was read from. Runs of older versions lack later fields, and so do their ids."""

    @property
    def id(self) -> str:
        """The hash of the content; the data counts by its fingerprint and not by its place."""
        return content_hash(self.to_dict(location=False))

    @property
    def label(self) -> str:
        """The name of the run in progress displays, with the settings if it tunes them."""
        setting = f" at lr {self.training.lr:g}, init {self.model.init}" if self.role == "tuning" else ""
        return f"{self.variant}{setting}"

    @classmethod
    def from_dict(cls, values: Any) -> Run:
        """Return the run that `to_dict` described; errors name fields relative to it."""
        run: Run = decode_part(cls, values)
        object.__setattr__(run, "_read", values)
        return run

    def describe_differences(self, other: Run) -> str:
        """Name the options in which another run differs, as in "training.lr is 0.01 there and 0.001 here"."""
        here, there = (dict(_flat_items(run.to_dict(location=False))) for run in (self, other))
        return list_some(
            [
                f"{name} is {there.get(name, 'unset')} there and {here.get(name, 'unset')} here"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ]
        )

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """Return plain JSON values; the original ones if the run was read from a file."""
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


def _flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects by their joined names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _marks(step: int, times: int, steps: int) -> bool:
    """Return whether one of `times` evenly spread marks, the last at the last step, lies in this step."""
    return (step + 1) * times // steps > step * times // steps
