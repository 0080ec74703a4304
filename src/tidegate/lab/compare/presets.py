"""Presets of a comparison: model and training sizes for each kind of task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tidegate.config import TransformerConfig, VisionConfig
from tidegate.gates import Gates
from tidegate.lab.tasks.task import Task, TaskData, TaskKind
from tidegate.lab.training.presets import SIZES
from tidegate.lab.training.run import ModelConfig, Training

PresetName: TypeAlias = Literal["tiny", "small", "base"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sizes of a model and its training."""

    d_model: int
    num_layers: int
    num_heads: int
    length: int | None = None
    """Sequence length in tokens; None takes the task's."""
    batch_size: int
    budget: int
    """Training tokens, or images."""
    lr: float
    patch_size: int = 4
    """Of images."""

    def model(self, task: Task, data: TaskData, gates: Gates) -> ModelConfig:
        """Return the configuration of this size for a task."""
        sizes: dict[str, Any] = {"d_model": self.d_model, "num_layers": self.num_layers, "num_heads": self.num_heads}
        if task.kind == "image":
            size, channels = data.facts["image_size"], data.facts["channels"]
            patch_size = self.patch_size if size % self.patch_size == 0 and size > 8 else 2 if size % 2 == 0 else 1
            sizes |= {"image_size": size, "patch_size": patch_size, "channels": channels}
            return VisionConfig(gate=gates, num_classes=data.vocab_size, **sizes)
        return TransformerConfig(gate=gates, **sizes, vocab_size=data.vocab_size, max_length=task.length)

    def training(self, task: Task, budget: int | None = None) -> Training:
        """Return the training of this size: the budget in whole steps, at least one."""
        per_step = self.batch_size * task.length
        return Training(
            steps=max(1, round((self.budget if budget is None else budget) / per_step)),
            batch_size=self.batch_size,
            lr=self.lr,
        )


def _decoder(name: PresetName, *, budget: int, lr: float) -> Preset:
    names = ("d_model", "num_layers", "num_heads", "length", "batch_size")
    return Preset(**{own: getattr(SIZES[name], own) for own in names}, budget=budget, lr=lr)


PRESETS: dict[TaskKind, dict[PresetName, Preset]] = {
    "lm": {
        "tiny": _decoder("tiny", budget=1_638_400, lr=3e-3),
        "small": _decoder("small", budget=20_971_520, lr=3e-3),
        "base": _decoder("base", budget=301_989_888, lr=1e-3),
    },
    "image": {
        "tiny": Preset(d_model=48, num_layers=2, num_heads=4, batch_size=64, budget=64_000, lr=2e-3, patch_size=2),
        "small": Preset(d_model=96, num_layers=4, num_heads=4, batch_size=64, budget=320_000, lr=1e-3),
        "base": Preset(d_model=192, num_layers=8, num_heads=6, batch_size=128, budget=6_400_000, lr=1e-3),
    },
    "recall": {
        "tiny": Preset(d_model=64, num_layers=2, num_heads=2, batch_size=64, budget=4_608_000, lr=2e-3),
        "small": Preset(d_model=128, num_layers=2, num_heads=4, batch_size=64, budget=18_432_000, lr=1e-3),
        "base": Preset(d_model=256, num_layers=4, num_heads=8, batch_size=128, budget=98_304_000, lr=1e-3),
    },
}
